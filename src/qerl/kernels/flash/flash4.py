"""FlashAttention-4 on Hopper: the package flash-attn-4, which compiles its kernels at their first call.

Its backward adds gradients up in one FP32 copy, each of its blocks waiting for the one before it.
"""

import torch
from flash_attn.cute import interface

from qerl.kernels.flash.choice import Extents


class Flash4:
    """See `qerl.kernels.flash.choice.Flash`."""

    def forward(
        self, q_LHE: torch.Tensor, k_MGE: torch.Tensor, v_MGE: torch.Tensor, extents: Extents, scale: float
    ) -> tuple[torch.Tensor, ...]:
        """See `qerl.kernels.flash.choice.Flash.forward`."""
        # Not its public function, whose node of autograd keeps keys and values.
        out_LHE, lse_HL, *_ = interface._flash_attn_fwd(
            q_LHE, k_MGE, v_MGE, softmax_scale=scale, causal=True, return_lse=True, **_named(extents)
        )
        return out_LHE, lse_HL

    def backward(
        self,
        dout_LHE: torch.Tensor,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        extents: Extents,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `qerl.kernels.flash.choice.Flash.backward`."""
        out_LHE, lse_HL = outputs
        dq_LHE, dk_MGE, dv_MGE = interface._flash_attn_bwd(
            *inputs, out_LHE, dout_LHE, lse_HL,
            softmax_scale=scale, causal=True, deterministic=True, **_named(extents),
        )  # fmt: skip
        return dq_LHE, dk_MGE, dv_MGE


def _named(extents: Extents) -> dict[str, torch.Tensor | int]:
    return {
        "cu_seqlens_q": extents.query_offsets_N,
        "cu_seqlens_k": extents.key_offsets_N,
        "max_seqlen_q": extents.longest_query,
        "max_seqlen_k": extents.longest_key,
    }
