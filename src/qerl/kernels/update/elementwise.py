"""RMSNorm, SwiGLU and rotary embedding of training, forward and backward, one kernel each.

Each reads its inputs once, computes in FP32, and rounds where transformers rounds: after normalising, after
the SiLU, and the result; products with cosine and sine are not rounded before they are added. Kept for
backward are the norm's input with one number a token, and gate and up. The norm's weight is taken as frozen.

gate and up, and q, k and v, may come side by side in one tensor, as a product of all of them writes them.
Their gradients then leave side by side, and nothing is copied on the way.

Shapes: T tokens, D hidden size, I intermediate size, H query heads, G key heads, E head size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_BLOCK_I = 1024
_HEADS = 16  # a program turns


def rms_norm(x: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``w * x / sqrt(mean(x^2) + eps)`` of [..., D] in 16 bits; no gradient for ``w``."""
    return _RMSNorm.apply(x, w_D, eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` in 16 bits: [..., I] each, or both side by side in one tensor [..., 2 I]."""
    return _SwiGLU.apply(gate, up)


def rotated_heads(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys after the rotary embedding, and values.

    Args:
        qkv: [B, T, (H + 2 G) E], queries, keys and values of a token side by side.
        cos, sin: [1 or B, T, E]; element i of a head is turned with element i + E / 2, as in transformers.
        heads, kv_heads: H and G.

    Returns:
        [B, T, H, E], [B, T, G, E] and [B, T, G, E].
    """
    return _RotatedHeads.apply(qkv, cos, sin, heads, kv_heads)


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


@triton.jit
def _rotate(
    qkv, q_THE, k_TGE, v_TGE, cos_TE, sin_TE, H, G,
    E: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    e = tl.arange(0, BLOCK)
    half: tl.constexpr = E // 2
    inside, e_row = e < half, e[None, :]
    is_q = (head < H) & inside[None, :]
    is_k = (head >= H) & (head < H + G) & inside[None, :]
    is_v = (head >= H + G) & (head < H + 2 * G) & inside[None, :]
    joint = qkv + (t * (H + 2 * G) + head) * E + e_row
    q = q_THE + (t * H + head) * E + e_row
    k = k_TGE + (t * G + head - H) * E + e_row
    v = v_TGE + (t * G + head - H - G) * E + e_row
    if BACKWARD:
        first = tl.load(q, mask=is_q, other=0.0) + tl.load(k, mask=is_k, other=0.0)
        second = tl.load(q + half, mask=is_q, other=0.0) + tl.load(k + half, mask=is_k, other=0.0)
        first = (first + tl.load(v, mask=is_v, other=0.0)).to(tl.float32)
        second = (second + tl.load(v + half, mask=is_v, other=0.0)).to(tl.float32)
    else:
        first = tl.load(joint, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
        second = tl.load(joint + half, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
    cos1 = tl.load(cos_TE + t * E + e, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_TE + t * E + half + e, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_TE + t * E + e, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_TE + t * E + half + e, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        turned1, turned2 = first * cos1 + second * sin2, second * cos2 - first * sin1
    else:
        turned1, turned2 = first * cos1 - second * sin1, second * cos2 + first * sin2
    first = tl.where(head < H + G, turned1, first)
    second = tl.where(head < H + G, turned2, second)
    if BACKWARD:
        tl.store(joint, first, mask=is_q | is_k | is_v)
        tl.store(joint + half, second, mask=is_q | is_k | is_v)
    else:
        tl.store(q, first, mask=is_q)
        tl.store(q + half, second, mask=is_q)
        tl.store(k, first, mask=is_k)
        tl.store(k + half, second, mask=is_k)
        tl.store(v, first, mask=is_v)
        tl.store(v + half, second, mask=is_v)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
    ) -> tuple[torch.Tensor, ...]:
        size, rows = cos.shape[-1], qkv.shape[:-1]
        cos, sin = (table.expand(*rows, size).contiguous() for table in (cos, sin))
        q, k, v = (qkv.new_empty(*rows, count, size) for count in (heads, kv_heads, kv_heads))
        _turn(qkv.contiguous(), q, k, v, cos, sin, backward=False)
        ctx.save_for_backward(cos, sin)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        dqkv = dq.new_empty(*dq.shape[:-2], (dq.shape[-2] + 2 * dk.shape[-2]) * dq.shape[-1])
        cos, sin = ctx.saved_tensors
        _turn(dqkv, dq.contiguous(), dk.contiguous(), dv.contiguous(), cos, sin, backward=True)
        return dqkv, None, None, None, None


def _turn(
    qkv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, backward: bool,
) -> None:  # fmt: skip
    heads, kv_heads, size = q.shape[-2], k.shape[-2], q.shape[-1]
    grid = (cos.numel() // size, triton.cdiv(heads + 2 * kv_heads, _HEADS))
    _rotate[grid](
        qkv, q, k, v, cos, sin, heads, kv_heads,
        E=size, BLOCK=triton.next_power_of_2(size // 2), HEADS=_HEADS, BACKWARD=backward,
    )  # fmt: skip
