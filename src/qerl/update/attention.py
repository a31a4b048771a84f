"""Attention of a packed row that computes only the visible pairs of query and key.

The dense mask of a group of 8 x 2048 tokens has 2.8e8 entries, 8 % of them visible. Here every segment of the
row (`packed_row.Branches`) is a sequence of FlashAttention's variable-length kernel: its queries, and the
keys it sees. Keys and values of a shared prompt are gathered once for each branch, a few megabytes; the
kernel's causal mask is aligned at the ends of queries and keys, which is exactly what a branch after its
prompt needs. Backward gathers again, so only queries, keys, values, output and the kernel's statistics are
kept; it adds up the gradients of a prompt's copies in fp32, in a fixed order.

A layer may have a window: counted from the end of a segment it is the window of the sample. And each head may
have a sink, a logit s in the softmax without a value. With l the log-sum-exp of the scores, a sink turns
output o and l into

    o' = o sigmoid(l - s),    l' = log(e^l + e^s)

and the gradient of a score, P (dP - sum(do o)), keeps its form with o' and P' = exp(score - l'). So the
kernel needs no code for sinks: its backward is given o' and l'.

The implementation is registered with transformers under `NAME`. A forward pass without `branches`
(evaluation, a padded batch) is plain SDPA.

Shapes: L tokens of the row, M keys of all segments, H query heads, G key heads, E head size.
"""

from types import FunctionType
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
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl.families.parts import eval_mode
from qerl.kernels import flash
from qerl.kernels.limits import MAX_HEAD
from qerl.update.delta_net import sequence_kwargs
from qerl.update.packed_row import Branches, MaskFunction, Sample, pack_row

NAME = "qerl_branches"


# Arguments that transformers' models pass to attention and that are handled here, or have no effect.
_KNOWN = {
    "branches", "sequences", "scaling", "sliding_window", "s_aux", "position_ids", "use_cache",
    "output_router_logits", "choices",
}  # fmt: skip


class _Declined(Exception):
    """Raised if the kernel would compute something other than the model's attention."""


def use_branch_attention(model: PreTrainedModel) -> str | None:
    """Make the attention of a 16-bit model on CUDA accept `branches=` in a forward pass, where possible.

    Returns:
        None; or the reason why the model keeps its attention and reads dense masks, which is slow for long
        rows.
    """
    reason = why_not(model)
    if not reason:
        model.set_attn_implementation(NAME)
    return reason


def why_not(model: PreTrainedModel) -> str | None:
    """Return why the kernel cannot replace the model's attention; None if it can.

    A row of a few tokens is run through the model: the masks that its layers request and their arguments to
    attention tell more than a list of families would. In place of each mask a layer gets the width of the
    mask's window, which must equal the window that the layer passes to attention.
    """
    if getattr(model.config.get_text_config(decoder=True), "attention_dropout", None):
        return "attention has dropout in training"
    before = model.config._attn_implementation
    row = pack_row([Sample([1, 1], [1, 1], [], [])] * 2, [0, 1], model.device)
    model.set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        return f"{type(model).__name__} does not allow its attention to be replaced"
    ALL_MASK_ATTENTION_FUNCTIONS[NAME] = _window_in_place_of_mask
    ALL_ATTENTION_FUNCTIONS[NAME] = _checked_attention
    try:
        with torch.no_grad(), eval_mode(model):
            model.base_model(
                input_ids=row.input_ids_1L,
                position_ids=row.position_ids_1L,
                attention_mask=torch.ones_like(row.input_ids_1L),
                branches=row.branches,
                use_cache=False,
                **sequence_kwargs(model, row),
            )
    except (_Declined, TypeError) as error:  # TypeError: it takes no `branches`
        return str(error)
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[NAME], ALL_ATTENTION_FUNCTIONS[NAME]
        model.set_attn_implementation(before)
    return None


def _window_in_place_of_mask(
    *, mask_function: MaskFunction, device: Any, local_size: int | None = None, **_: Any
) -> torch.Tensor:
    """Return, in place of the requested mask, the width of its window; 0 for none."""
    window = 0
    if mask_function is not causal_mask_function:
        if not local_size or not _same(mask_function, sliding_window_causal_mask_function(local_size)):
            raise _Declined("the mask of a layer is neither causal nor a sliding window")
        window = local_size
    return torch.full((1, 1, 1, 1), window, device=device)


def _same(one: Any, other: Any) -> bool:
    """Return True if two functions have the same code and the same closure values."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        values = (tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other))
        return one.__code__ is other.__code__ and _same(*values)
    return type(one) is type(other) is int and one == other


def _checked_attention(
    module: nn.Module,
    query_1HLE: torch.Tensor,
    key_1GLE: torch.Tensor,
    value_1GLE: torch.Tensor,
    window: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    if window is None or window.numel() != 1 or int(window) != (settings.get("sliding_window") or 0):
        raise _Declined(f"the mask of {type(module).__name__} differs from its argument sliding_window")
    return branch_attention(module, query_1HLE, key_1GLE, value_1GLE, None, **settings)


def _check_call(query_1HLE: torch.Tensor, value_1GLE: torch.Tensor, settings: dict[str, Any]) -> None:
    """Raise `_Declined` for features that the kernel lacks: soft caps, biases, other head sizes."""
    asked = {name for name, value in settings.items() if value is not None and name not in _KNOWN}
    if settings.get("is_causal") is True:
        asked.discard("is_causal")
    if settings.get("dropout") == 0.0:
        asked.discard("dropout")
    if asked:
        raise _Declined(f"attention is called with {', '.join(sorted(asked))}, which the kernel lacks")
    window, sinks_H = settings.get("sliding_window"), settings.get("s_aux")
    if sinks_H is not None and sinks_H.requires_grad:
        raise _Declined("its sinks train")
    size = query_1HLE.size(-1)
    if size % 8 or value_1GLE.size(-1) != size:
        raise _Declined(f"heads have {size} and {value_1GLE.size(-1)} columns")
    if size > MAX_HEAD and (window or sinks_H is not None):
        raise _Declined(f"heads have {size} columns, and windows or sinks")


def attention_kwargs(branches: Branches) -> dict[str, Any]:
    """Arguments of a forward pass that attends along the segments of a packed row."""
    # Given a mask of four dimensions, transformers makes none of its own; this one is never read.
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
        return _plain_attention(module, query_1HLE, key_1GLE, value_1GLE, attention_mask, **kwargs)
    _check_call(query_1HLE, value_1GLE, kwargs)
    # Not [0], whose backward writes the gradient into zeros of the full shape.
    rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_1HLE, key_1GLE, value_1GLE))
    scale, sinks_H = kwargs.get("scaling"), kwargs.get("s_aux")
    scale = query_1HLE.shape[-1] ** -0.5 if scale is None else scale
    scoring = flash.Scoring(scale, kwargs.get("sliding_window"), sinks_H is not None)
    out_LHE = _BranchAttention.apply(*rows, branches, scoring, sinks_H)
    return out_LHE[None], None


def _plain_attention(
    module: nn.Module,
    query_BHLE: torch.Tensor,
    key_BGTE: torch.Tensor,
    value_BGTE: torch.Tensor,
    mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run SDPA; a sink becomes one more key, of zeros, whose score is its entry in the mask."""
    if s_aux is not None:
        shape = (*query_BHLE.shape[:3], key_BGTE.shape[2])
        if mask is None:
            mask = torch.ones(shape[2:], dtype=torch.bool, device=query_BHLE.device).tril(shape[3] - shape[2])
        bias = query_BHLE.new_zeros(shape).masked_fill(~mask, -torch.inf)
        sink = s_aux.to(bias.dtype)[:, None, None].expand(*shape[:3], 1)
        mask = torch.cat((bias, sink), dim=-1)
        key_BGTE, value_BGTE = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (key_BGTE, value_BGTE))
    return cast(
        tuple[torch.Tensor, None],
        sdpa_attention_forward(module, query_BHLE, key_BGTE, value_BGTE, mask, **kwargs),
    )


class _BranchAttention(torch.autograd.Function):
    """Attention along the segments as one node of autograd; backward gathers keys and values again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_LHE: torch.Tensor,
        k_LGE: torch.Tensor,
        v_LGE: torch.Tensor,
        branches: Branches,
        scoring: flash.Scoring,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.branches, ctx.scoring = branches, scoring
        keys_M = branches.keys_M
        out_LHE, *others = flash.forward(q_LHE, k_LGE[keys_M], v_LGE[keys_M], _extents(branches), scoring)
        if sinks_H is not None:
            lse_HL, sinks_H1 = others[0], sinks_H[:, None].to(others[0].dtype)
            out_LHE.mul_((lse_HL - sinks_H1).sigmoid().T[..., None])
            others[0] = torch.logaddexp(lse_HL, sinks_H1)
        ctx.save_for_backward(q_LHE, k_LGE, v_LGE, out_LHE, *others)
        return out_LHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_LHE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_LHE, k_LGE, v_LGE, *outputs = ctx.saved_tensors
        branches: Branches = ctx.branches
        inputs = q_LHE, k_LGE[branches.keys_M], v_LGE[branches.keys_M]
        dq_LHE, dk_MGE, dv_MGE = flash.backward(
            dout_LHE.contiguous(), inputs, tuple(outputs), _extents(branches), ctx.scoring
        )
        return dq_LHE, _add_copies(dk_MGE, branches), _add_copies(dv_MGE, branches), None, None, None


def _extents(branches: Branches) -> flash.Extents:
    b = branches
    return flash.Extents(b.query_offsets_N, b.key_offsets_N, b.longest_query, b.longest_key)


def _add_copies(gradient_MGE: torch.Tensor, branches: Branches) -> torch.Tensor:
    """Return the gradient [L, G, E] of keys or values, from the gradients of their copies."""
    gradient_LGE = gradient_MGE[branches.own_L]
    for prompt, index_BP in branches.copies:
        copies = gradient_MGE[index_BP].sum(0, dtype=torch.float32)
        gradient_LGE[prompt] = (gradient_LGE[prompt].float() + copies).to(gradient_LGE.dtype)
    return gradient_LGE


AttentionInterface.register(NAME, branch_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
