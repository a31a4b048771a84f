"""Residual add, RMSNorm weight and LoRA around one sublayer's end and the next one's start, in one launch.

    y = residual + scale * GEMM + (h A_out^T) B_out^T          (or the token's embedding, at the first layer)
    u = y * w, the next GEMM's input; 1/rms(y) is applied by the reader of that GEMM
    partial sums of y^2 and of u A_in^T per block of columns

w is fp32 and may carry noise.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.common import add_low, begin, clear, load_low, ranks, sum_splits

BLOCK_D = 64


@triton.jit
def _residual_norm(
    gemm_STN, scale_1, low_TR, b_DR, table_VD, tokens_T,
    residual_TD, w_D, a_RD, u_TD, squares_PT, next_TR, spent_TR,
    T, D, N,
    S: tl.constexpr, R_SPENT: tl.constexpr, R_SPENT_PADDED: tl.constexpr, R_OUT: tl.constexpr,
    R_IN: tl.constexpr, R_IN_PADDED: tl.constexpr,
    EMBED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t, in_d = t < T, d < D
    inside = in_t[:, None] & in_d[None, :]
    at = t[:, None].to(tl.int64) * D + d[None, :]
    w = tl.load(w_D + d, mask=in_d, other=0.0)
    if R_OUT > 0:
        r_out = tl.arange(0, R_OUT)
        b = tl.load(b_DR + d[:, None] * R_OUT + r_out[None, :], mask=in_d[:, None], other=0.0)
    if R_IN > 0:
        r_in = tl.arange(0, R_IN_PADDED)
        in_r = r_in < R_IN
        a = tl.load(a_RD + r_in[:, None] * D + d[None, :], mask=in_r[:, None] & in_d[None, :], other=0.0)
    if not EMBED:
        y = tl.load(residual_TD + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_1)
    begin(PDL)
    clear(spent_TR, block, t, in_t, R_SPENT, R_SPENT_PADDED)
    if EMBED:
        token = tl.load(tokens_T + t, mask=in_t, other=0).to(tl.int64)
        y = tl.load(table_VD + token[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        y += sum_splits(gemm_STN, t, in_t, d, in_d, T, N, S) * scale
        if R_OUT > 0:
            low = load_low(low_TR, 0, t, in_t, R_OUT, R_OUT)
            y += tl.dot(low.to(b.dtype), tl.trans(b), out_dtype=tl.float32)
    y = y.to(residual_TD.dtype.element_ty)
    tl.store(residual_TD + at, y, mask=inside)
    y = y.to(tl.float32)
    tl.store(squares_PT + block * T + t, tl.sum(y * y, axis=1), mask=in_t)
    u = (y * w[None, :]).to(u_TD.dtype.element_ty)
    tl.store(u_TD + at, u, mask=inside)
    if R_IN > 0:
        partial = tl.dot(u, tl.trans(a), out_dtype=tl.float32)
        add_low(next_TR, partial, t, in_t, r_in, in_r, R_IN)


def residual_norm(
    residual_TD: torch.Tensor,
    w_D: torch.Tensor,
    u_TD: torch.Tensor,
    squares_PT: torch.Tensor,
    *,
    gemm_STN: torch.Tensor | None = None,
    scale_1: torch.Tensor | None = None,
    low_TR: torch.Tensor | None = None,
    b_DR: torch.Tensor | None = None,
    embedding: tuple[torch.Tensor, torch.Tensor] | None = None,
    a_RD: torch.Tensor | None = None,
    next_TR: torch.Tensor | None = None,
    spent_TR: torch.Tensor | None = None,
    pdl: bool = True,
) -> None:
    """Launches the kernel; see the module's text.

    Args:
        residual_TD: Residual stream, bf16, updated in place.
        w_D: RMSNorm weight, fp32.
        u_TD: bf16, written.
        squares_PT: fp32 [ceil(D / 64), T], written.
        gemm_STN: The sublayer's GEMM output, fp32 or bf16 [S, T, N >= D]; None with ``embedding``.
        scale_1: fp32 [1], multiplies the GEMM's output.
        low_TR: int64 sum of the sublayer's x A^T; None without LoRA.
        b_DR: Its B, bf16, scaled by alpha / r.
        embedding: (table [V, D], token ids [T]), instead of a GEMM.
        a_RD: Stacked A of the next GEMM; None without LoRA.
        next_TR: int64 [T, R], zero before, the sum u A^T after.
        spent_TR: A sum that is not needed any more, set to zero.
    """
    tokens, width = residual_TD.shape
    block_t = 16
    stacked = 0 if a_RD is None else a_RD.shape[0]
    dummy = residual_TD
    table, ids = embedding if embedding is not None else (dummy, dummy)
    _residual_norm[(triton.cdiv(width, BLOCK_D), triton.cdiv(tokens, block_t))](
        dummy if gemm_STN is None else gemm_STN,
        dummy if scale_1 is None else scale_1,
        dummy if low_TR is None else low_TR,
        dummy if b_DR is None else b_DR,
        table, ids, residual_TD, w_D,
        dummy if a_RD is None else a_RD,
        u_TD, squares_PT,
        dummy if next_TR is None else next_TR,
        dummy if spent_TR is None else spent_TR,
        tokens, width, width if gemm_STN is None else gemm_STN.shape[2],
        S=1 if gemm_STN is None else gemm_STN.shape[0],
        R_SPENT=ranks(spent_TR), R_SPENT_PADDED=triton.next_power_of_2(ranks(spent_TR)),
        R_OUT=0 if b_DR is None else b_DR.shape[1],
        R_IN=stacked, R_IN_PADDED=triton.next_power_of_2(stacked),
        EMBED=embedding is not None,
        BLOCK_T=block_t, BLOCK_D=BLOCK_D, PDL=pdl, num_warps=4 if stacked <= 128 else 8,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
