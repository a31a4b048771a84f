"""Residual add, RMSNorm weight and LoRA around one sublayer's end and the next one's start, in one launch.

    y = residual + scale * GEMM + (h A_out^T) B_out^T          (or the token's embedding, at the first layer)
    u = y * w, the next GEMM's input; 1/rms(y) is applied by the reader of that GEMM
    partial sums of y^2 and of u A_in^T per block of columns

w is fp32 and may carry noise. The residual stream is fp32: rounding it to bf16 after every sublayer is most
of what a bf16 forward pass is off by, and here the bytes hardly count.
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
    load_a,
    load_b,
    operand_at,
    part_counts,
    ranks,
    sum_parts,
)
from qerl.kernels.limits import rank_part, stacked_part


def block_d(tokens: int) -> int:
    """Columns a program owns: few when there are few tokens, so that all multiprocessors take part; more when
    there are many, because every program adds its part of x A^T for each token."""
    return 64 if tokens <= 32 else 128


@triton.jit
def _residual_norm(
    gemm_STN, parts_G, scale_1, low_CTR, b_DR, table_VD, tokens_T,
    residual_TD, w_D, a_RD, u_TD, squares_PT, next_CTR, spent_CTR,
    T, D, N,
    S: tl.constexpr, R_SPENT: tl.constexpr, R_SPENT_PADDED: tl.constexpr, R_OUT: tl.constexpr,
    OUT_PART: tl.constexpr, R_IN: tl.constexpr, IN_PART: tl.constexpr,
    COPIES: tl.constexpr, NEXT_COPIES: tl.constexpr, SPENT_COPIES: tl.constexpr,
    EMBED: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t, in_d = t < T, d < D
    inside = in_t[:, None] & in_d[None, :]
    at = t[:, None].to(tl.int64) * D + d[None, :]
    w = tl.load(w_D + d, mask=in_d, other=0.0)
    if R_OUT > 0:
        b = load_b(b_DR, d, in_d, 0, R_OUT, OUT_PART)
    if R_IN > 0:
        a = load_a(a_RD, 0, d, in_d, D, R_IN, IN_PART)
    if not EMBED:
        y = tl.load(residual_TD + at, mask=inside, other=0.0)
        scale = tl.load(scale_1)
        counts = part_counts(parts_G, d, in_d, S)
    begin(PDL)
    clear(spent_CTR, block, t, in_t, T, R_SPENT, R_SPENT_PADDED, SPENT_COPIES)
    if EMBED:
        token = tl.load(tokens_T + t, mask=in_t, other=0).to(tl.int64)
        y = tl.load(table_VD + token[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        y += sum_parts(gemm_STN, counts, t, in_t, d, in_d, T, N, S) * scale
        if R_OUT > 0:
            y += apply_b(low_CTR, 0, b, b_DR, d, in_d, t, in_t, T, R_OUT, R_OUT, OUT_PART, COPIES)
    tl.store(residual_TD + at, y, mask=inside)
    tl.store(squares_PT + block * T + t, tl.sum(y * y, axis=1), mask=in_t)
    u = (y * w[None, :]).to(u_TD.dtype.element_ty)
    tl.store(u_TD + operand_at(t, d, D, PADDED), u, mask=inside)
    if R_IN > 0:
        apply_a(next_CTR, block, u, a, a_RD, d, in_d, D, t, in_t, T, R_IN, IN_PART, NEXT_COPIES)


def residual_norm(
    residual_TD: torch.Tensor,
    w_D: torch.Tensor,
    u_TD: torch.Tensor,
    squares_PT: torch.Tensor,
    *,
    padded: int = 0,
    gemm_STN: torch.Tensor | None = None,
    parts_G: torch.Tensor | None = None,
    scale_1: torch.Tensor | None = None,
    low_CTR: torch.Tensor | None = None,
    b_DR: torch.Tensor | None = None,
    embedding: tuple[torch.Tensor, torch.Tensor] | None = None,
    a_RD: torch.Tensor | None = None,
    next_CTR: torch.Tensor | None = None,
    spent_CTR: torch.Tensor | None = None,
) -> None:
    """Launches the kernel; see the module's text.

    Args:
        residual_TD: Residual stream, fp32, updated in place.
        w_D: RMSNorm weight, fp32.
        u_TD: bf16, written, [T, D] or in a small GEMM's order.
        squares_PT: fp32 [ceil(D / block_d(T)), T], written.
        padded: Tokens that ``u_TD`` has room for in a small GEMM's order; 0 for [T, D].
        gemm_STN: The sublayer's GEMM output, fp32 or bf16 [S, T, N >= D]; None with ``embedding``.
        parts_G: int32, how many of the S each 64 columns have; None if S is 1.
        scale_1: fp32 [1], multiplies the GEMM's output.
        low_CTR: int64 [C, T, R] sum of the sublayer's x A^T; None without LoRA.
        b_DR: Its B, bf16, scaled by alpha / r.
        embedding: (table [V, D], token ids [T]), instead of a GEMM.
        a_RD: Stacked A of the next GEMM; None without LoRA.
        next_CTR: int64 [C, T, R], zero before, the sum u A^T after.
        spent_CTR: A sum that is not needed any more, set to zero.
    """
    tokens, width = residual_TD.shape
    block_t, columns = 16, block_d(tokens)
    stacked = 0 if a_RD is None else a_RD.shape[0]
    own = 0 if b_DR is None else b_DR.shape[1]
    dummy = residual_TD
    table, ids = embedding if embedding is not None else (dummy, dummy)
    _residual_norm[(triton.cdiv(width, columns), triton.cdiv(tokens, block_t))](
        dummy if gemm_STN is None else gemm_STN,
        dummy if parts_G is None else parts_G,
        dummy if scale_1 is None else scale_1,
        dummy if low_CTR is None else low_CTR,
        dummy if b_DR is None else b_DR,
        table, ids, residual_TD, w_D,
        dummy if a_RD is None else a_RD,
        u_TD, squares_PT,
        dummy if next_CTR is None else next_CTR,
        dummy if spent_CTR is None else spent_CTR,
        tokens, width, width if gemm_STN is None else gemm_STN.shape[2],
        S=1 if gemm_STN is None else gemm_STN.shape[0],
        R_SPENT=ranks(spent_CTR), R_SPENT_PADDED=triton.next_power_of_2(ranks(spent_CTR)),
        R_OUT=own, OUT_PART=rank_part(own), R_IN=stacked, IN_PART=stacked_part(stacked),
        COPIES=copies(low_CTR), NEXT_COPIES=copies(next_CTR), SPENT_COPIES=copies(spent_CTR),
        EMBED=embedding is not None, PADDED=padded,
        BLOCK_T=block_t, BLOCK_D=columns, num_warps=4 if stacked <= 128 else 8,
        **dependent(residual_TD),
    )  # fmt: skip
