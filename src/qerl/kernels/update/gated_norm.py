"""The gated RMSNorm after a delta rule in the update, one kernel forward and one backward.

The kernel reads each head's output and its gate once, computes in FP32, and rounds where transformers rounds:
after normalising, after the weight, and the result. Backward keeps both inputs and recomputes 1/rms, which
costs nothing beside reading them. The weight is assumed to be frozen.

Shapes: N heads of all tokens, E head size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_ELEMENTS = 4096  # per program


def gated_norm(x_NE: torch.Tensor, z_NE: torch.Tensor, w_E: torch.Tensor, eps: float) -> torch.Tensor:
    """``w * x / sqrt(mean(x^2) + eps) * silu(z)``, [N, E] in the 16-bit dtype of ``x``.

    Args:
        x_NE, z_NE: Outputs and gates, in one dtype.
        w_E: In that dtype or in FP32; gets no gradient.
        eps: As in transformers.
    """
    return _GatedNorm.apply(x_NE, z_NE, w_E, eps)


@triton.jit
def _gated_rms_norm(x_NE, z_NE, w_E, y_NE, N, eps, E: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, PADDED)
    inside = (n < N)[:, None] & (e < E)[None, :]
    at = n[:, None] * E + e[None, :]
    x = tl.load(x_NE + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_NE + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_E + e, mask=e < E, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / E + eps)
    unit = (x * rstd[:, None]).to(y_NE.dtype.element_ty).to(tl.float32)
    normed = (unit * w[None, :]).to(y_NE.dtype.element_ty).to(tl.float32)
    tl.store(y_NE + at, normed * z * tl.sigmoid(z), mask=inside)


@triton.jit
def _gated_rms_norm_backward(
    dy_NE, x_NE, z_NE, w_E, dx_NE, dz_NE, N, eps,
    E: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, PADDED)
    inside = (n < N)[:, None] & (e < E)[None, :]
    at = n[:, None] * E + e[None, :]
    x = tl.load(x_NE + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_NE + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_NE + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_E + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    rstd = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / E + eps))[:, None]
    unit, sigmoid = x * rstd, tl.sigmoid(z)
    dunit = dy * w * z * sigmoid
    dx = (dunit - unit * (tl.sum(unit * dunit, axis=1) / E)[:, None]) * rstd
    dz = dy * w * unit * sigmoid * (1.0 + z * (1.0 - sigmoid))
    tl.store(dx_NE + at, dx, mask=inside)
    tl.store(dz_NE + at, dz, mask=inside)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NE: torch.Tensor, z_NE: torch.Tensor, w_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        x_NE, z_NE = x_NE.contiguous(), z_NE.contiguous()
        y_NE = torch.empty_like(x_NE)
        grid, constants = _launch(x_NE)
        _gated_rms_norm[grid](x_NE, z_NE, w_E, y_NE, len(x_NE), eps, **constants)
        ctx.save_for_backward(x_NE, z_NE, w_E)
        ctx.eps = eps
        return y_NE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NE, z_NE, w_E = ctx.saved_tensors
        dx_NE, dz_NE = torch.empty_like(x_NE), torch.empty_like(z_NE)
        grid, constants = _launch(x_NE)
        _gated_rms_norm_backward[grid](
            dy_NE.contiguous(), x_NE, z_NE, w_E, dx_NE, dz_NE, len(x_NE), ctx.eps, **constants
        )
        return dx_NE, dz_NE, None, None


def _launch(x_NE: torch.Tensor) -> tuple[tuple[int], dict[str, int]]:
    count, size = x_NE.shape
    padded = triton.next_power_of_2(size)
    rows = max(1, _ELEMENTS // padded)
    return (triton.cdiv(count, rows),), {"E": size, "PADDED": padded, "ROWS": rows, "num_warps": 4}
