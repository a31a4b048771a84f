"""RMSNorm and SwiGLU of training, forward and backward, one kernel each.

Each reads its inputs once, computes in FP32, and rounds where transformers rounds: after normalising, and
after the SiLU. Kept for backward are the inputs and one number a token. The norm's weight is taken as frozen.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_BLOCK_I = 1024


def rms_norm(x: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``w * x / sqrt(mean(x^2) + eps)`` of [..., D] in 16 bits; no gradient for ``w``."""
    return _RMSNorm.apply(x, w_D, eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of equal shapes in 16 bits."""
    return _SwiGLU.apply(gate, up)


@triton.jit
def _norm(x_TD, w_D, y_TD, rstd_T, D, eps, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x) / D + eps)
    unit = (x * rstd).to(y_TD.dtype.element_ty).to(tl.float32)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(y_TD + t * D + d, unit * w, mask=d < D)
    tl.store(rstd_T + t, rstd)


@triton.jit
def _norm_backward(dy_TD, x_TD, w_D, rstd_T, dx_TD, D, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    dy = tl.load(dy_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    w = tl.load(w_D + d, mask=d < D, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_T + t)
    unit, dunit = x * rstd, dy * w
    dx = (dunit - unit * (tl.sum(unit * dunit) / D)) * rstd
    tl.store(dx_TD + t * D + d, dx, mask=d < D)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        tokens = x.numel() // width
        y = torch.empty_like(x)
        rstd_T = torch.empty(tokens, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        _norm[(tokens,)](x, w_D, y, rstd_T, width, eps, BLOCK=block, num_warps=_warps(block))
        ctx.save_for_backward(x, w_D, rstd_T)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w_D, rstd_T = ctx.saved_tensors
        dx = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[-1])
        _norm_backward[(rstd_T.numel(),)](
            dy.contiguous(), x, w_D, rstd_T, dx, x.shape[-1], BLOCK=block, num_warps=_warps(block)
        )
        return dx, None, None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit
def _swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + i, silu * u, mask=i < count)


@triton.jit
def _swiglu_backward(dout, gate, up, dgate, dup, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < count, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    d = tl.load(dout + i, mask=i < count, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(dgate + i, d * u * (sigmoid + silu * (1.0 - sigmoid)), mask=i < count)
    tl.store(dup + i, d * silu, mask=i < count)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _swiglu[(triton.cdiv(gate.numel(), _BLOCK_I),)](gate, up, out, gate.numel(), BLOCK=_BLOCK_I)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), _BLOCK_I),)
        _swiglu_backward[grid](dout.contiguous(), gate, up, dgate, dup, gate.numel(), BLOCK=_BLOCK_I)
        return dgate, dup
