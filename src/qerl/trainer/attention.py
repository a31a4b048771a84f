"""Attention of a packed row that computes only what is seen.

The dense mask of a group of 8 x 2048 tokens has 2.8e8 entries of which 8 % are seen. Here every stretch of
the row (`packing.Branches`) is a sequence of FlashAttention's variable-length kernel: its queries, and the
keys it sees. Keys and values of a shared prompt are gathered once for each branch, a few megabytes; the
kernel's causal mask is aligned at the ends of queries and keys, which is exactly what a branch after its
prompt needs. Backward gathers again, so nothing beyond queries, keys, values and output is kept, and adds the
gradients of a prompt's copies up in fp32, in a fixed order.

FlashAttention's own backward adds the gradients of queries atomically unless told otherwise. It is told
otherwise: a resumed run must meet the same bits.

The implementation is registered with transformers under `NAME`. A forward pass without `branches`
(evaluation, a padded batch) is plain SDPA.

Shapes: L tokens of the row, M keys of all stretches, H query heads, G key heads, E head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from qerl.trainer.packing import Branches

NAME = "qerl_branches"


def use_branch_attention(model: PreTrainedModel) -> bool:
    """Make the model take `branches=` in its forward pass, where its attention allows it.

    Returns:
        Whether it does: 16-bit on CUDA, every layer attending to all that came before.
    """
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if model.device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16) or window:
        return False
    model.set_attn_implementation(NAME)
    return True


def seen_by(branches: Branches) -> dict[str, Any]:
    """Arguments of a forward pass that attends along the stretches."""
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
    """transformers' attention function: returns [1, L, H, E]."""
    if branches is None:
        return sdpa_attention_forward(
            module, query_1HLE, key_1GLE, value_1GLE, attention_mask, **kwargs
        )  # fmt: skip
    rows = (tensor[0].transpose(0, 1) for tensor in (query_1HLE, key_1GLE, value_1GLE))
    out_LHE = _BranchAttention.apply(*rows, branches, kwargs.get("scaling"))
    return out_LHE[None], None


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_LHE: torch.Tensor,
        k_LGE: torch.Tensor,
        v_LGE: torch.Tensor,
        branches: Branches,
        scale: float | None,
    ) -> torch.Tensor:
        k_MGE, v_MGE = k_LGE[branches.keys_M], v_LGE[branches.keys_M]
        out_LHE, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_LHE, k_MGE, v_MGE, *_extents(branches), 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q_LHE, k_LGE, v_LGE, out_LHE, lse, state, unused)
        ctx.branches, ctx.scale = branches, scale
        return out_LHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_LHE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_LHE, k_LGE, v_LGE, out_LHE, lse, state, unused = ctx.saved_tensors
        branches: Branches = ctx.branches
        k_MGE, v_MGE = k_LGE[branches.keys_M], v_LGE[branches.keys_M]
        with _deterministic():
            dq_LHE, dk_MGE, dv_MGE = torch.ops.aten._flash_attention_backward(
                dout_LHE.contiguous(), q_LHE, k_MGE, v_MGE, out_LHE, lse, *_extents(branches), 0.0, True,
                state, unused, scale=ctx.scale,
            )  # fmt: skip
        return dq_LHE, _add_copies(dk_MGE, branches), _add_copies(dv_MGE, branches), None, None


def _extents(branches: Branches) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    b = branches
    return b.first_query_S, b.first_key_S, b.longest_query, b.longest_key


def _add_copies(gradient_MGE: torch.Tensor, branches: Branches) -> torch.Tensor:
    """Gradient [L, G, E] of the keys from that of their copies."""
    gradient_LGE = gradient_MGE[branches.own_L]
    for prompt, index_BP in branches.copies:
        copies = gradient_MGE[index_BP].sum(0, dtype=torch.float32)
        gradient_LGE[prompt] = (gradient_LGE[prompt].float() + copies).to(gradient_LGE.dtype)
    return gradient_LGE


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False  # costs a pass over every new tensor
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


AttentionInterface.register(NAME, branch_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
