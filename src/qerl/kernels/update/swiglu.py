"""SwiGLU and GeGLU of the update, one kernel forward and one backward.

The kernel reads gate and up once, computes in FP32, and rounds where transformers rounds: after the
activation, and the result. Backward keeps gate and up. Both activations are g sigmoid(u(g)): SiLU with u = g,
and GELU in its tanh approximation, as tanh(x) = 2 sigmoid(2 x) - 1, with u = sqrt(8 / pi) (g + 0.044715 g^3).

Gate and up may be the halves of one tensor, as one product of both layers writes them. Their gradients are
then halves of one tensor too, and nothing is copied.

Shapes: T tokens, I intermediate size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_BLOCK_I = 1024


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, gelu: bool = False) -> torch.Tensor:
    """``silu(gate) * up``, [..., I] in 16 bits.

    Args:
        gate, up: [..., I] each, or both side by side in ``gate``, [..., 2 I].
        gelu: Whether the activation is GELU, in its tanh approximation, instead.
    """
    return _SwiGLU.apply(gate, up, gelu)


@triton.jit
def sigmoid_of(g, GELU: tl.constexpr):
    """The sigmoid that g is multiplied with, and the derivative of its argument."""
    if GELU:
        u, du = 1.5957691216 * (g + 0.044715 * g * g * g), 1.5957691216 * (1.0 + 0.134145 * g * g)
    else:
        u, du = g, 1.0
    return tl.sigmoid(u), du


@triton.jit
def _swiglu(gate, up, out_TI, stride, INNER, GELU: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    u = tl.load(up + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    sigmoid, _ = sigmoid_of(g, GELU)
    activated = (g * sigmoid).to(out_TI.dtype.element_ty).to(tl.float32)
    tl.store(out_TI + t * INNER + i, activated * u, mask=i < INNER)


@triton.jit
def _swiglu_backward(dout_TI, gate, up, dgate, dup, stride, INNER, GELU: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    u = tl.load(up + t * stride + i, mask=i < INNER, other=0.0).to(tl.float32)
    d = tl.load(dout_TI + t * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    sigmoid, slope = sigmoid_of(g, GELU)
    activated = g * sigmoid
    derivative = sigmoid + activated * (1.0 - sigmoid) * slope
    tl.store(dgate + t * stride + i, d * u * derivative, mask=i < INNER)
    tl.store(dup + t * stride + i, d * activated, mask=i < INNER)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, gelu: bool) -> torch.Tensor:
        ctx.gelu = gelu
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        ctx.save_for_backward(gate, up)
        g, u = _halves(gate, up)
        out = torch.empty(g.shape, dtype=g.dtype, device=g.device)
        _swiglu[_rows_and_blocks(out)](g, u, out, g.stride(-2), g.shape[-1], GELU=gelu, BLOCK=_BLOCK_I)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        g, u = _halves(gate, up)
        _swiglu_backward[_rows_and_blocks(dout)](
            *(dout.contiguous(), g, u, *_halves(dgate, dup), g.stride(-2), g.shape[-1]),
            GELU=ctx.gelu, BLOCK=_BLOCK_I,
        )  # fmt: skip
        return dgate, dup, None


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def _rows_and_blocks(out: torch.Tensor) -> tuple[int, int]:
    width = out.shape[-1]
    return out.numel() // width, triton.cdiv(width, _BLOCK_I)
