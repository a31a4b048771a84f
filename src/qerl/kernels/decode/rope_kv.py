"""From the q/k/v GEMM's output to rotated queries and the paged KV cache, in one launch.

For each head of each token: 1/rms, global scale, LoRA B, bias, q/k norm (Qwen3), rotary embedding; queries go
to a buffer, keys and values to their slot of the cache.

KV cache: [blocks, kv heads, 64 tokens, head size] for keys and the same for values, so that one program of
the attention kernel reads a block's keys of one head as one contiguous piece. It is bf16, or E4M3 without a
scale, which holds up to 448; what is larger is cut off there.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import (
    apply_b,
    begin,
    both,
    in_head,
    inverse_rms,
    load_b,
    load_head,
    partial_counts,
    sum_partials,
)
from qerl.kernels.decode.launch import NO_B, LoraB
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import rank_part


@triton.jit
def normed_and_rotated(
    x1, x2, cos, sin, weight_E, e, in_e, eps,
    E: tl.constexpr, HALF: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of a head after its norm, if queries and keys have one, and the rotary embedding."""
    if QK_NORM:
        norm = 1.0 / tl.sqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / E + eps)
        x1 = x1 * norm[:, None] * load_head(weight_E + e, in_e)[None, :]
        x2 = x2 * norm[:, None] * load_head(weight_E + HALF + e, in_e)[None, :]
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def store_halves(to, x1, x2, inside, HALF: tl.constexpr):
    """Stores both halves of a head, in the dtype of what they go to."""
    tl.store(to, x1.to(to.dtype.element_ty), mask=inside)
    tl.store(to + HALF, x2.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _rope_kv(
    gemm_STN, partials_G, scale_3, squares_PT, xa_TR, b_NR, bias_N, qk_norm_2E,
    cos_ME, sin_ME, position_T, slot_T, q_THE, k_cache, v_cache,
    T, N, D, eps,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, R: tl.constexpr, PART: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, E: tl.constexpr, HALF_PADDED: tl.constexpr, PAGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    HALF: tl.constexpr = E // 2
    e = tl.arange(0, HALF_PADDED)
    in_e = in_head(e, HALF)
    n1 = head * E + e
    n2 = n1 + HALF
    part = tl.where(head < HQ, 0, tl.where(head < HQ + HKV, 1, 2))
    every = e < HALF
    scale = tl.load(scale_3 + part)
    counts1, counts2 = partial_counts(partials_G, n1, every, S), partial_counts(partials_G, n2, every, S)
    if R > 0:
        b1 = load_b(b_NR, n1, every, 0, R, PART)
        b2 = load_b(b_NR, n2, every, 0, R, PART)
    if HAS_BIAS:
        bias1 = load_head(bias_N + n1, in_e).to(tl.float32)
        bias2 = load_head(bias_N + n2, in_e).to(tl.float32)
    slot = tl.load(slot_T + t, mask=in_t, other=-1)
    angle = tl.load(position_T + t, mask=in_t, other=0)[:, None] * HALF + e[None, :]
    cos, sin = load_head(cos_ME + angle, in_e), load_head(sin_ME + angle, in_e)
    begin(PDL)
    rms = inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)
    x1 = sum_partials(gemm_STN, counts1, t, in_t, n1, every, T, N, S) * scale
    x2 = sum_partials(gemm_STN, counts2, t, in_t, n2, every, T, N, S) * scale
    if R > 0:
        x1 += apply_b(xa_TR, part * R, b1, b_NR, n1, every, t, in_t, 3 * R, R, PART)
        x2 += apply_b(xa_TR, part * R, b2, b_NR, n2, every, t, in_t, 3 * R, R, PART)
    x1 *= rms[:, None]
    x2 *= rms[:, None]
    if HAS_BIAS:
        x1 += bias1[None, :]
        x2 += bias2[None, :]
    if part < 2:
        weight_E = qk_norm_2E + part * E
        x1, x2 = normed_and_rotated(x1, x2, cos, sin, weight_E, e, in_e, eps, E, HALF, QK_NORM)
    if part == 0:
        at = (t[:, None] * HQ + head) * E + e[None, :]
        store_halves(q_THE + at, x1, x2, both(in_t[:, None], in_e), HALF)
    else:
        kv_head = head - HQ - (part - 1) * HKV
        page = (slot // PAGE).to(tl.int64)
        cached = ((page * HKV + kv_head) * PAGE + slot % PAGE)[:, None] * E + e[None, :]
        written = both((slot >= 0)[:, None], in_e)
        if k_cache.dtype.element_ty == tl.float8e4nv:
            # A NaN must stay one: the sequence that sees it ends with a reason.
            x1 = tl.clamp(x1, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            x2 = tl.clamp(x2, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if part == 1:
            store_halves(k_cache + cached, x1, x2, written, HALF)
        else:
            store_halves(v_cache + cached, x1, x2, written, HALF)


def rope_kv(
    gemm_STN: torch.Tensor,
    scale_3: torch.Tensor,
    squares_PT: torch.Tensor,
    cos_ME: torch.Tensor,
    sin_ME: torch.Tensor,
    position_T: torch.Tensor,
    slot_T: torch.Tensor,
    q_THE: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    width: int,
    eps: float,
    partials_G: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    qk_norm_2E: torch.Tensor | None = None,
    b: LoraB = NO_B,
) -> None:
    """Write rotated queries to a buffer, and rotated keys and values to their slots of the cache.

    Args:
        gemm_STN: fp32 or bf16 [S, T, N], N at least (query heads + 2 kv heads) * head size.
        scale_3: fp32 factors of q, k and v in the GEMM's output.
        squares_PT: Partial sums of squares from :func:`residual_norm`.
        cos_ME, sin_ME: fp32 [positions, head size / 2].
        position_T: int32 position of each token.
        slot_T: int32 block * block tokens + offset where its key and value go; -1 writes nothing.
        q_THE: bf16 [T, query heads, head size], written.
        k_cache, v_cache: [blocks, kv heads, block tokens, head size], written at the slots.
        width: Hidden size, over which the mean square is taken.
        eps: Added to the mean square, as the RMSNorms do.
        partials_G: int32, how many of the S partial sums each 64 columns have; None if S is 1.
        bias_N: Bias of q, k, v, any floating dtype.
        qk_norm_2E: fp32 weights of the query and key norm.
        b: LoRA of q, k and v: the three B on top of each other, and the sum x A^T [T, 3 R] of all.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    splits, tokens, columns = gemm_STN.shape
    heads, size = q_THE.shape[1:]
    kv_heads, page = k_cache.shape[1:3]
    block_t, shared = 16, shared_bytes(q_THE)
    squares = squares_PT.shape[0]
    arguments = pointers(
        "rope_kv", gemm_STN, gemm_STN=gemm_STN, partials_G=partials_G, scale_3=scale_3,
        squares_PT=squares_PT, xa_TR=b.xa.sum_TR, b_NR=b.b_NR,
        bias_N=bias_N, qk_norm_2E=qk_norm_2E, cos_ME=cos_ME, sin_ME=sin_ME, position_T=position_T,
        slot_T=slot_T, q_THE=q_THE, k_cache=k_cache, v_cache=v_cache,
    )  # fmt: skip
    _rope_kv[(heads + 2 * kv_heads, triton.cdiv(tokens, block_t))](
        *arguments, tokens, columns, width, eps,
        S=splits, SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        **b.constants(rank_part(b.ranks, shared)),
        HQ=heads, HKV=kv_heads, E=size, HALF_PADDED=triton.next_power_of_2(size // 2), PAGE=page,
        HAS_BIAS=bias_N is not None, QK_NORM=qk_norm_2E is not None,
        BLOCK_T=block_t, num_warps=4, **dependent(gemm_STN),
    )  # fmt: skip
