"""SwiGLU of the update, one kernel forward and one backward.

The kernel reads gate and up once, computes in FP32, and rounds where transformers rounds: after the SiLU, and
the result. Kept for backward are gate and up.

Gate and up may come side by side in one tensor, as one product of both layers writes them. Their gradients
then leave side by side, and nothing is copied on the way.

Shapes: T tokens, I intermediate size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_BLOCK_I = 1024


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up``, [..., I] in 16 bits.

    Args:
        gate, up: [..., I] each, or both side by side in ``gate``, [..., 2 I].
    """
    return _SwiGLU.apply(gate, up)


@triton.jit
def _swiglu(gate, up, out_TI, stride, INNER, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    u = tl.load(up + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(out_TI.dtype.element_ty).to(tl.float32)
    tl.store(out_TI + t * INNER + i, silu * u, mask=i < INNER)


@triton.jit
def _swiglu_backward(dout_TI, gate, up, dgate, dup, stride, INNER, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    u = tl.load(up + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    d = tl.load(dout_TI + t * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(dgate + t * stride + i, d * u * (sigmoid + silu * (1.0 - sigmoid)), mask=i < INNER)
    tl.store(dup + t * stride + i, d * silu, mask=i < INNER)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        ctx.save_for_backward(gate, up)
        g, u = _halves(gate, up)
        out = torch.empty(g.shape, dtype=g.dtype, device=g.device)
        _swiglu[_rows_and_blocks(out)](g, u, out, g.stride(-2), g.shape[-1], BLOCK=_BLOCK_I)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        g, u = _halves(gate, up)
        _swiglu_backward[_rows_and_blocks(dout)](
            dout.contiguous(), g, u, *_halves(dgate, dup), g.stride(-2), g.shape[-1], BLOCK=_BLOCK_I
        )
        return dgate, dup


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def _rows_and_blocks(out: torch.Tensor) -> tuple[int, int]:
    width = out.shape[-1]
    return out.numel() // width, triton.cdiv(width, _BLOCK_I)
