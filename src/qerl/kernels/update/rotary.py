"""Rotary embedding of the update, one kernel forward and one backward.

The kernel takes queries, keys and values side by side, as one product of all three writes them, rotates
queries and keys, and writes three separate tensors, as attention reads them. Backward writes the three
gradients side by side again, so nothing else is copied. The kernel computes in FP32, and products with cosine
and sine are not rounded before they are added.

Shapes: B batch, T tokens, H query heads, G key heads, E head size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_HEADS_PER_PROGRAM = 16


def rotated_heads(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys after the rotary embedding, and values.

    Args:
        qkv: [B, T, (H + 2 G) E], queries, keys and values of a token side by side.
        cos, sin: [1 or B, T, E]; element i of a head is rotated with element i + E / 2, as in transformers.
        heads, kv_heads: H and G.

    Returns:
        [B, T, H, E], [B, T, G, E] and [B, T, G, E].
    """
    return _RotatedHeads.apply(qkv, cos, sin, heads, kv_heads)


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
    grid = (cos.numel() // size, triton.cdiv(heads + 2 * kv_heads, _HEADS_PER_PROGRAM))
    _rotate[grid](
        qkv, q, k, v, cos, sin, heads, kv_heads,
        E=size, BLOCK=triton.next_power_of_2(size // 2), HEADS=_HEADS_PER_PROGRAM, BACKWARD=backward,
    )  # fmt: skip
