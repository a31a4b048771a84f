"""RMSNorm of the update, one kernel forward and one backward.

The kernel reads its input once, computes in FP32, and rounds where transformers rounds: after normalising,
and the result; in Gemma and OLMo only the result. A weight of higher precision than the input, as one with
noise, makes every bit of the product count: then only the result is rounded, too. Backward keeps the input
and one number per token. The weight is assumed to be frozen. Several weights apply to as many equal parts of
the tokens, one per policy of a batch of several policies.

Shapes: T tokens, D hidden size, G weights.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable


def rms_norm(
    x: torch.Tensor, w_GD: torch.Tensor, eps: float, added: float = 0.0, rounds_unit: bool = True
) -> torch.Tensor:
    """``(added + w) * x / sqrt(mean(x^2) + eps)``, [..., D] in the 16-bit dtype of ``x``.

    Args:
        x: [..., D].
        w_GD: [D], or [..., D] for as many equal parts of the tokens, in their order; in the dtype of ``x``,
            or in FP32, with which only the result is rounded. Gets no gradient.
        eps: As in transformers.
        added: Added to the weight: 1 in Gemma 1 to 3, else 0.
        rounds_unit: Whether the normalised input is also rounded, before the product with the weight.
    """
    return _RMSNorm.apply(x, w_GD, eps, added, rounds_unit)


@triton.jit(do_not_specialize=["part"])
def _norm(x_TD, w_GD, y_TD, rstd_T, D, part, eps, added, ROUND_UNIT: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x) / D + eps)
    unit = x * rstd
    if ROUND_UNIT:
        unit = unit.to(y_TD.dtype.element_ty).to(tl.float32)
    w = added + tl.load(w_GD + t // part * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_TD + t * D + d, unit * w, mask=d < D)
    tl.store(rstd_T + t, rstd)


@triton.jit(do_not_specialize=["part"])
def _norm_backward(dy_TD, x_TD, w_GD, rstd_T, dx_TD, D, part, added, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    dy = tl.load(dy_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    w = added + tl.load(w_GD + t // part * D + d, mask=d < D, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_T + t)
    unit, dunit = x * rstd, dy * w
    dx = (dunit - unit * (tl.sum(unit * dunit) / D)) * rstd
    tl.store(dx_TD + t * D + d, dx, mask=d < D)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w_GD: torch.Tensor, eps: float, added: float, rounds_unit: bool
    ) -> torch.Tensor:
        x, w_GD = x.contiguous(), w_GD.contiguous()
        width = x.shape[-1]
        tokens = x.numel() // width
        y = torch.empty_like(x)
        rstd_T = torch.empty(tokens, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        rounds = rounds_unit and w_GD.dtype == x.dtype
        part = x.numel() // w_GD.numel()
        _norm[(tokens,)](
            *(x, w_GD, y, rstd_T, width, part, eps, added),
            ROUND_UNIT=rounds, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        ctx.save_for_backward(x, w_GD, rstd_T)
        ctx.part, ctx.added = part, added
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w_GD, rstd_T = ctx.saved_tensors
        dx = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[-1])
        _norm_backward[(rstd_T.numel(),)](
            *(dy.contiguous(), x, w_GD, rstd_T, dx, x.shape[-1], ctx.part, ctx.added),
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        return dx, None, None, None, None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))
