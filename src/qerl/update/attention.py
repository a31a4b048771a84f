"""Attention of a packed row that computes only what is seen.

The dense mask of a group of 8 x 2048 tokens has 2.8e8 entries of which 8 % are seen. Here every segment of
the row (`packed_row.Branches`) is a sequence of FlashAttention's variable-length kernel: its queries, and the
keys it sees. Keys and values of a shared prompt are gathered once for each branch, a few megabytes; the
kernel's causal mask is aligned at the ends of queries and keys, which is exactly what a branch after its
prompt needs. Backward gathers again, so nothing beyond queries, keys, values and output is kept, and adds the
gradients of a prompt's copies up in fp32, in a fixed order.

The implementation is registered with transformers under `NAME`. A forward pass without `branches`
(evaluation, a padded batch) is plain SDPA.

Shapes: L tokens of the row, M keys of all segments, H query heads, G key heads, E head size.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)

from qerl.families.parts import eval_mode
from qerl.kernels import flash
from qerl.update.packed_row import Branches, MaskFunction, Sample, pack_row

NAME = "qerl_branches"


# What transformers' models hand to an attention function and plain causal attention has no use for.
_HARMLESS = {"branches", "scaling", "sliding_window", "position_ids", "use_cache"}
_MAX_HEAD = 256


class _Declined(Exception):
    """Raised where the kernel would compute something else than the model's attention."""


def use_branch_attention(model: PreTrainedModel) -> str | None:
    """Make the attention of a 16-bit model on CUDA take `branches=` in a forward pass, where it allows that.

    Returns:
        None; or the reason why the model keeps its attention and reads dense masks, which is slow for long
        rows.
    """
    reason = why_not(model)
    if not reason:
        model.set_attn_implementation(NAME)
    return reason


def why_not(model: PreTrainedModel) -> str | None:
    """The reason why the kernel cannot stand for the model's attention; None where it can.

    A row of a few tokens is run through the model. What its layers ask of masks and hand to attention says
    more than a list of families would.
    """
    if getattr(model.config.get_text_config(decoder=True), "attention_dropout", None):
        return "attention has dropout, which it has in training alone"
    before = model.config._attn_implementation
    row = pack_row([Sample([1, 1], [1, 1], [], [])] * 2, [0, 1], model.device)
    model.set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        return f"{type(model).__name__} lets nobody replace its attention"
    ALL_MASK_ATTENTION_FUNCTIONS[NAME] = _causal_only
    try:
        with torch.no_grad(), eval_mode(model):
            model.base_model(
                input_ids=row.input_ids_1L,
                position_ids=row.position_ids_1L,
                attention_mask=torch.ones_like(row.input_ids_1L),
                branches=row.branches,
                use_cache=False,
            )
    except (_Declined, TypeError) as error:  # TypeError: it takes no `branches`
        return str(error)
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[NAME]
        model.set_attn_implementation(before)
    return None


def _causal_only(*, mask_function: MaskFunction, **_: Any) -> None:
    if mask_function is not causal_mask_function:
        raise _Declined("not every layer attends to all that came before")


def _check_call(query_1HLE: torch.Tensor, value_1GLE: torch.Tensor, settings: dict[str, Any]) -> None:
    """Raise `_Declined` for what the kernel would leave out: soft caps, sinks, biases, other head sizes."""
    asked = {name for name, value in settings.items() if value is not None and name not in _HARMLESS}
    if settings.get("is_causal") is True:
        asked.discard("is_causal")
    if settings.get("dropout") == 0.0:
        asked.discard("dropout")
    if asked:
        raise _Declined(f"attention is called with {', '.join(sorted(asked))}")
    size = query_1HLE.size(-1)
    if size % 8 or size > _MAX_HEAD or value_1GLE.size(-1) != size:
        raise _Declined(f"heads have {size} and {value_1GLE.size(-1)} columns")


def attention_kwargs(branches: Branches) -> dict[str, Any]:
    """Arguments of a forward pass that attends along the segments of a packed row."""
    # transformers makes no mask of its own where it is given one of four dimensions; nobody reads this one.
    unread = branches.keys_M.new_ones(1, 1, 1, 1, dtype=torch.bool)
    return {"attention_mask": unread, "branches": branches}


def branch_attention(
    module: nn.Module,
    query_1HLE: torch.Tensor,
    key_1GLE: torch.Tensor,
    value_1GLE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    branches: Branches | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; its output is [1, L, H, E]."""
    if branches is None:
        return sdpa_attention_forward(
            module, query_1HLE, key_1GLE, value_1GLE, attention_mask, **kwargs
        )  # fmt: skip
    _check_call(query_1HLE, value_1GLE, kwargs)
    # Not [0], whose backward writes the gradient into zeros of the whole.
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_1HLE, key_1GLE, value_1GLE))
    out_LHE = _BranchAttention.apply(*rows, branches, kwargs.get("scaling"))
    return out_LHE[None], None


class _BranchAttention(torch.autograd.Function):
    """Attention along the segments as one node of autograd; backward gathers keys and values anew."""

    @staticmethod
    def forward(
        ctx: Any,
        q_LHE: torch.Tensor,
        k_LGE: torch.Tensor,
        v_LGE: torch.Tensor,
        branches: Branches,
        scale: float | None,
    ) -> torch.Tensor:
        ctx.branches, ctx.scale = branches, q_LHE.shape[-1] ** -0.5 if scale is None else scale
        keys_M, extents = branches.keys_M, _extents(branches)
        outputs = flash.forward(q_LHE, k_LGE[keys_M], v_LGE[keys_M], extents, ctx.scale)
        ctx.save_for_backward(q_LHE, k_LGE, v_LGE, *outputs)
        return cast(torch.Tensor, outputs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_LHE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_LHE, k_LGE, v_LGE, *outputs = ctx.saved_tensors
        branches: Branches = ctx.branches
        inputs = q_LHE, k_LGE[branches.keys_M], v_LGE[branches.keys_M]
        dq_LHE, dk_MGE, dv_MGE = flash.backward(
            dout_LHE.contiguous(), inputs, tuple(outputs), _extents(branches), ctx.scale
        )
        return dq_LHE, _add_copies(dk_MGE, branches), _add_copies(dv_MGE, branches), None, None


def _extents(branches: Branches) -> flash.Extents:
    b = branches
    return flash.Extents(b.query_offsets_N, b.key_offsets_N, b.longest_query, b.longest_key)


def _add_copies(gradient_MGE: torch.Tensor, branches: Branches) -> torch.Tensor:
    """The gradient [L, G, E] of the keys, from the gradients of their copies."""
    gradient_LGE = gradient_MGE[branches.own_L]
    for prompt, index_BP in branches.copies:
        copies = gradient_MGE[index_BP].sum(0, dtype=torch.float32)
        gradient_LGE[prompt] = (gradient_LGE[prompt].float() + copies).to(gradient_LGE.dtype)
    return gradient_LGE


AttentionInterface.register(NAME, branch_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
