"""silu(gate) * up with LoRA on both, and down's x A^T, in one launch.

A program owns some columns of the intermediate size, few when there are few tokens, so that all
multiprocessors take part. With many tokens it takes several blocks of them in turn, so that A and B of its
columns are read once for all of them.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import (
    apply_a,
    apply_b,
    begin,
    clear,
    copies,
    dependent,
    inverse_rms,
    load_a,
    load_b,
    operand_at,
    part_counts,
    ranks,
    sum_parts,
)
from qerl.kernels.limits import rank_part


@triton.jit
def _silu_mul(
    gemm_STN, parts_G, scale_2, squares_PT, low_CTR, b_NR, a_RI, h_TI, next_CTR, spent_CTR,
    T, N, INNER, D, eps,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, R: tl.constexpr, PART: tl.constexpr,
    R_SPENT: tl.constexpr, R_SPENT_PADDED: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
    COPIES: tl.constexpr, NEXT_COPIES: tl.constexpr, SPENT_COPIES: tl.constexpr,
    BLOCK_T: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    in_n = n < INNER
    gate_counts, up_counts = part_counts(parts_G, n, in_n, S), part_counts(parts_G, INNER + n, in_n, S)
    gate_scale, up_scale = tl.load(scale_2), tl.load(scale_2 + 1)
    if R > 0:
        gate_b = load_b(b_NR, n, in_n, 0, R, PART)
        up_b = load_b(b_NR, INNER + n, in_n, 0, R, PART)
        a = load_a(a_RI, 0, n, in_n, INNER, R, PART)
    begin(PDL)
    for i in range(ROUNDS):
        t = (tl.program_id(1) * ROUNDS + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        in_t = t < T
        clear(spent_CTR, block, t, in_t, T, R_SPENT, R_SPENT_PADDED, SPENT_COPIES)
        rms = inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)
        gate = sum_parts(gemm_STN, gate_counts, t, in_t, n, in_n, T, N, S) * gate_scale
        up = sum_parts(gemm_STN, up_counts, t, in_t, INNER + n, in_n, T, N, S) * up_scale
        if R > 0:
            gate += apply_b(low_CTR, 0, gate_b, b_NR, n, in_n, t, in_t, T, 2 * R, R, PART, COPIES)
            up += apply_b(low_CTR, R, up_b, b_NR, INNER + n, in_n, t, in_t, T, 2 * R, R, PART, COPIES)
        gate *= rms[:, None]
        up *= rms[:, None]
        h = (gate * tl.sigmoid(gate) * up).to(h_TI.dtype.element_ty)
        tl.store(h_TI + operand_at(t, n, INNER, PADDED), h, mask=in_t[:, None] & in_n[None, :])
        if R > 0:
            apply_a(next_CTR, block, h, a, a_RI, n, in_n, INNER, t, in_t, T, R, PART, NEXT_COPIES)


def cut(tokens: int) -> tuple[int, int]:
    """(columns a program owns, blocks of 16 tokens it takes in turn)."""
    if tokens <= 16:
        return 128, 1
    return 128, -(-tokens // 32) if tokens <= 64 else min(4, -(-tokens // 64))


def silu_mul(
    gemm_STN: torch.Tensor,
    scale_2: torch.Tensor,
    squares_PT: torch.Tensor,
    h_TI: torch.Tensor,
    *,
    intermediate: int,
    width: int,
    eps: float,
    padded: int = 0,
    parts_G: torch.Tensor | None = None,
    low_CTR: torch.Tensor | None = None,
    b_NR: torch.Tensor | None = None,
    a_RI: torch.Tensor | None = None,
    next_CTR: torch.Tensor | None = None,
    spent_CTR: torch.Tensor | None = None,
) -> None:
    """Launches the kernel; see the module's text.

    Args:
        gemm_STN: fp32 or bf16 [S, T, N], columns 0..I gate and I..2I up.
        scale_2: fp32 factors of gate and up.
        squares_PT: Partial sums of squares from :func:`residual_norm`.
        h_TI: bf16, written, [T, I] or in a small GEMM's order.
        intermediate: I.
        width: Hidden size, over which the mean square is taken.
        eps: Of the RMSNorm.
        padded: Tokens that ``h_TI`` has room for in a small GEMM's order; 0 for [T, I].
        parts_G: int32, how many of the S each 64 columns have; None if S is 1.
        low_CTR: int64 sum of x A^T for gate and up, [C, T, 2 R]; None without LoRA, like the following.
        b_NR: B of gate on top of B of up, bf16, scaled.
        a_RI: A of down.
        next_CTR: int64 [C, T, R], zero before, the sum h A^T after.
        spent_CTR: A sum that is not needed any more, set to zero.
    """
    splits, tokens, columns = gemm_STN.shape
    partials = squares_PT.shape[0]
    block_t = 16  # 32 tokens at once spill registers
    columns_each, rounds = cut(tokens)
    dummy = h_TI
    own = 0 if b_NR is None else b_NR.shape[1]
    # Half the registers that the compiler wants let four programs share a multiprocessor instead of two. At
    # 128 ranks shared memory has room for two anyway, and fewer registers would only spill.
    capped = {"maxnreg": 128} if tokens > 64 and own <= 64 else {}
    _silu_mul[(triton.cdiv(intermediate, columns_each), triton.cdiv(tokens, block_t * rounds))](
        gemm_STN, dummy if parts_G is None else parts_G, scale_2, squares_PT,
        dummy if low_CTR is None else low_CTR,
        dummy if b_NR is None else b_NR,
        dummy if a_RI is None else a_RI,
        h_TI,
        dummy if next_CTR is None else next_CTR,
        dummy if spent_CTR is None else spent_CTR,
        tokens, columns, intermediate, width, eps,
        S=splits, SQ_P=partials, SQ_PADDED=triton.next_power_of_2(partials),
        R_SPENT=ranks(spent_CTR), R_SPENT_PADDED=triton.next_power_of_2(ranks(spent_CTR)),
        R=own, PART=rank_part(own),
        COPIES=copies(low_CTR), NEXT_COPIES=copies(next_CTR), SPENT_COPIES=copies(spent_CTR),
        PADDED=padded, COLUMNS=columns_each, BLOCK_T=block_t, ROUNDS=rounds, num_warps=columns_each // 32,
        **capped, **dependent(gemm_STN),
    )  # fmt: skip
