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
    clear,
    copies,
    dependent,
    inverse_rms,
    load_b,
    part_counts,
    ranks,
    sum_parts,
)
from qerl.kernels.limits import PAGE, rank_part


@triton.jit
def _rope_kv(
    gemm_STN, parts_G, scale_3, squares_PT, low_CTR, spent_CTR, b_NR, bias_N, qk_norm_2E, cos_ME, sin_ME,
    position_T, slot_T,
    q_THE, k_cache, v_cache,
    T, N, D, eps,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, R: tl.constexpr,
    PART: tl.constexpr, R_SPENT: tl.constexpr, R_SPENT_PADDED: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    COPIES: tl.constexpr, SPENT_COPIES: tl.constexpr,
    HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    HALF: tl.constexpr = E // 2
    e = tl.arange(0, HALF)
    n1 = head * E + e
    n2 = n1 + HALF
    part = tl.where(head < HQ, 0, tl.where(head < HQ + HKV, 1, 2))
    every = e < HALF
    scale = tl.load(scale_3 + part)
    counts1, counts2 = part_counts(parts_G, n1, every, S), part_counts(parts_G, n2, every, S)
    if R > 0:
        b1 = load_b(b_NR, n1, every, 0, R, PART)
        b2 = load_b(b_NR, n2, every, 0, R, PART)
    if HAS_BIAS:
        bias1 = tl.load(bias_N + n1).to(tl.float32)
        bias2 = tl.load(bias_N + n2).to(tl.float32)
    slot = tl.load(slot_T + t, mask=in_t, other=-1)
    angle = tl.load(position_T + t, mask=in_t, other=0)[:, None] * HALF + e[None, :]
    cos, sin = tl.load(cos_ME + angle), tl.load(sin_ME + angle)
    begin(PDL)
    clear(spent_CTR, head, t, in_t, T, R_SPENT, R_SPENT_PADDED, SPENT_COPIES)
    rms = inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)
    x1 = sum_parts(gemm_STN, counts1, t, in_t, n1, every, T, N, S) * scale
    x2 = sum_parts(gemm_STN, counts2, t, in_t, n2, every, T, N, S) * scale
    if R > 0:
        x1 += apply_b(low_CTR, part * R, b1, b_NR, n1, every, t, in_t, T, 3 * R, R, PART, COPIES)
        x2 += apply_b(low_CTR, part * R, b2, b_NR, n2, every, t, in_t, T, 3 * R, R, PART, COPIES)
    x1 *= rms[:, None]
    x2 *= rms[:, None]
    if HAS_BIAS:
        x1 += bias1[None, :]
        x2 += bias2[None, :]
    if part < 2:
        if QK_NORM:
            norm = 1.0 / tl.sqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / E + eps)
            x1 = x1 * norm[:, None] * tl.load(qk_norm_2E + part * E + e)[None, :]
            x2 = x2 * norm[:, None] * tl.load(qk_norm_2E + part * E + HALF + e)[None, :]
        rotated = x1 * cos - x2 * sin
        x2 = x2 * cos + x1 * sin
        x1 = rotated
    if part == 0:
        at = (t[:, None] * HQ + head) * E + e[None, :]
        tl.store(q_THE + at, x1.to(q_THE.dtype.element_ty), mask=in_t[:, None])
        tl.store(q_THE + at + HALF, x2.to(q_THE.dtype.element_ty), mask=in_t[:, None])
    else:
        kv_head = head - HQ - (part - 1) * HKV
        page = (slot // PAGE).to(tl.int64)
        cached = ((page * HKV + kv_head) * PAGE + slot % PAGE)[:, None] * E + e[None, :]
        written = (slot >= 0)[:, None]
        if k_cache.dtype.element_ty == tl.float8e4nv:
            # A NaN must stay one: the sequence that sees it ends with a reason.
            x1 = tl.clamp(x1, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            x2 = tl.clamp(x2, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if part == 1:
            tl.store(k_cache + cached, x1.to(k_cache.dtype.element_ty), mask=written)
            tl.store(k_cache + cached + HALF, x2.to(k_cache.dtype.element_ty), mask=written)
        else:
            tl.store(v_cache + cached, x1.to(v_cache.dtype.element_ty), mask=written)
            tl.store(v_cache + cached + HALF, x2.to(v_cache.dtype.element_ty), mask=written)


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
    parts_G: torch.Tensor | None = None,
    low_CTR: torch.Tensor | None = None,
    spent_CTR: torch.Tensor | None = None,
    b_NR: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    qk_norm_2E: torch.Tensor | None = None,
) -> None:
    """Launches the kernel; see the module's text.

    Args:
        gemm_STN: fp32 or bf16 [S, T, N], N at least (query heads + 2 kv heads) * head size.
        scale_3: fp32 factor of the q, k and v parts of the GEMM's output.
        squares_PT: Partial sums of squares from :func:`residual_norm`.
        cos_ME, sin_ME: fp32 [positions, head size / 2].
        position_T: int32 position of each token.
        slot_T: int32 block * 64 + offset where its key and value go; -1 writes nothing.
        q_THE: bf16 [T, query heads, head size], written.
        k_cache, v_cache: [blocks, kv heads, 64, head size], written at the slots.
        width: Hidden size, over which the mean square is taken.
        eps: Of the RMSNorm.
        parts_G: int32, how many of the S each 64 columns have; None if S is 1.
        low_CTR: int64 sum of x A^T for q, k, v, [C, T, 3 R].
        spent_CTR: A sum that is not needed any more, set to zero.
        b_NR: The three B on top of each other, bf16, scaled.
        bias_N: Bias of q, k, v, any floating dtype.
        qk_norm_2E: fp32 weights of the query and key norm.
    """
    splits, tokens, columns = gemm_STN.shape
    heads, size = q_THE.shape[1:]
    kv_heads = k_cache.shape[1]
    block_t = 16
    partials = squares_PT.shape[0]
    dummy = gemm_STN
    own = 0 if b_NR is None else b_NR.shape[1]
    _rope_kv[(heads + 2 * kv_heads, triton.cdiv(tokens, block_t))](
        gemm_STN, dummy if parts_G is None else parts_G, scale_3, squares_PT,
        dummy if low_CTR is None else low_CTR,
        dummy if spent_CTR is None else spent_CTR,
        dummy if b_NR is None else b_NR,
        dummy if bias_N is None else bias_N,
        dummy if qk_norm_2E is None else qk_norm_2E,
        cos_ME, sin_ME, position_T, slot_T, q_THE, k_cache, v_cache,
        tokens, columns, width, eps,
        S=splits, SQ_P=partials, SQ_PADDED=triton.next_power_of_2(partials),
        R=own, PART=rank_part(own),
        R_SPENT=ranks(spent_CTR), R_SPENT_PADDED=triton.next_power_of_2(ranks(spent_CTR)), HQ=heads,
        HKV=kv_heads, E=size, PAGE=PAGE, COPIES=copies(low_CTR), SPENT_COPIES=copies(spent_CTR),
        HAS_BIAS=bias_N is not None, QK_NORM=qk_norm_2E is not None,
        BLOCK_T=block_t, num_warps=4, **dependent(gemm_STN),
    )  # fmt: skip
