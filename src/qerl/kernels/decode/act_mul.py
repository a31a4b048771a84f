"""silu(gate) * up, or GELU(gate) * up, with LoRA on both, and down's x A^T, in one launch.

A program owns 128 columns of the intermediate size. With many tokens it takes several blocks of 16 tokens in
turn, so that A and B of its columns are read once for all of them.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import (
    apply_a,
    begin,
    inverse_rms,
    load_a,
    load_b,
    load_xa,
    partial_counts,
    store_operand,
    sum_partials,
    times_b,
)
from qerl.kernels.decode.launch import NO_A, NO_B, LoraA, LoraB
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import rank_part


@triton.jit
def _act_mul(
    gemm_STN, partials_G, scale_2, squares_PT, xa_TR, b_NR, a_RK, h_TI, parts_PTR,
    T, N, INNER, D, eps,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr,
    R: tl.constexpr, R_TOTAL: tl.constexpr, PART: tl.constexpr, A_RANKS: tl.constexpr, A_PART: tl.constexpr,
    FUSED: tl.constexpr, GELU: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_T: tl.constexpr, ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    in_n = n < INNER
    gate_counts = partial_counts(partials_G, n, in_n, S)
    up_counts = partial_counts(partials_G, INNER + n, in_n, S)
    LINEARS: tl.constexpr = 1 if FUSED else 2
    gate_scale, up_scale = tl.load(scale_2), tl.load(scale_2 + LINEARS - 1)
    if R > 0:
        gate_b = load_b(b_NR, n, in_n, 0, R, PART)
        up_b = load_b(b_NR, INNER + n, in_n, 0, R, PART)
    if A_RANKS > 0:
        a = load_a(a_RK, 0, n, in_n, INNER, A_RANKS, A_PART)
    begin(PDL)
    for i in range(ROUNDS):
        t = (tl.program_id(1) * ROUNDS + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        in_t = t < T
        # All loads of a round stand before the sum over warps, whose barriers none of them would pass.
        gate = sum_partials(gemm_STN, gate_counts, t, in_t, n, in_n, T, N, S)
        up = sum_partials(gemm_STN, up_counts, t, in_t, INNER + n, in_n, T, N, S)
        if R > 0:
            gate_xa = load_xa(xa_TR, 0, t, in_t, R_TOTAL, PART)
            up_xa = load_xa(xa_TR, (LINEARS - 1) * R, t, in_t, R_TOTAL, PART)
        rms = inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)
        gate, up = gate * gate_scale, up * up_scale
        if R > 0:
            gate += times_b(gate_xa, xa_TR, 0, gate_b, b_NR, n, in_n, t, in_t, R_TOTAL, R, PART)
            up += times_b(
                up_xa, xa_TR, (LINEARS - 1) * R, up_b, b_NR, INNER + n, in_n, t, in_t, R_TOTAL, R, PART
            )
        gate *= rms[:, None]
        up *= rms[:, None]
        bent = gate
        if GELU:
            bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        h = (gate * tl.sigmoid(bent) * up).to(h_TI.dtype.element_ty)
        store_operand(h_TI, h, t, n, in_t[:, None] & in_n[None, :], INNER, PADDED)
        if A_RANKS > 0:
            apply_a(parts_PTR, block, h, a, a_RK, n, in_n, INNER, t, in_t, T, A_RANKS, A_PART)


BLOCK_I = 128
"""Columns of a program."""


def blocks_in_turn(tokens: int) -> int:
    """Blocks of 16 tokens that one program takes in turn: two, and four in the long passes of prefill."""
    return 4 if tokens > 512 else min(2, triton.cdiv(tokens, 32))


def act_mul(
    gemm_STN: torch.Tensor,
    scale_2: torch.Tensor,
    squares_PT: torch.Tensor,
    h_TI: torch.Tensor,
    *,
    intermediate: int,
    width: int,
    eps: float,
    gelu: bool = False,
    fused: bool = False,
    padded_tokens: int = 0,
    partials_G: torch.Tensor | None = None,
    b: LoraB = NO_B,
    a: LoraA = NO_A,
) -> None:
    """Write activation(gate) * up, the input of the down projection.

    Args:
        gemm_STN: fp32 or bf16 [S, T, N], columns 0..I gate and I..2I up.
        scale_2: fp32 factors of gate and up; one where they are one linear.
        squares_PT: Partial sums of squares from :func:`residual_norm`.
        h_TI: bf16, written, [T, I] or in the order of ``packed_gemm``.
        intermediate: I.
        width: Hidden size, over which the mean square is taken.
        eps: Added to the mean square, as the RMSNorm does.
        gelu: GELU by its approximation with tanh, in the place of SiLU.
        fused: True if one linear with one adapter makes both.
        padded_tokens: Tokens that ``h_TI`` has room for in the order of ``packed_gemm``; 0 for [T, I].
        partials_G: int32, how many of the S partial sums each 64 columns have; None if S is 1.
        b: LoRA of gate and up: B of gate on top of B of up, and the sum x A^T [T, 2 R] of both, or [T, R];
            columns behind those are of other linears.
        a: LoRA of down.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    splits, tokens, columns = gemm_STN.shape
    squares = squares_PT.shape[0]
    block_t = 16  # 32 tokens at once spill registers
    rounds, shared = blocks_in_turn(tokens), shared_bytes(h_TI)
    # One stage: loads ahead of the next 16 tokens take shared memory, at 256 ranks more than any card has.
    # Half the registers that the compiler wants let four programs share a multiprocessor instead of two. At
    # 128 ranks shared memory has room for two anyway, and fewer registers would only spill.
    capped = {"maxnreg": 128} if tokens > 64 and b.ranks <= 64 else {}
    arguments = pointers(
        "act_mul", h_TI, gemm_STN=gemm_STN, partials_G=partials_G, scale_2=scale_2, squares_PT=squares_PT,
        xa_TR=b.xa.sum_TR, b_NR=b.b_NR, a_RK=a.a_RK, h_TI=h_TI, parts_PTR=a.xa.parts_PTR,
    )  # fmt: skip
    _act_mul[(triton.cdiv(intermediate, BLOCK_I), triton.cdiv(tokens, block_t * rounds))](
        *arguments, tokens, columns, intermediate, width, eps,
        S=splits, SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        **b.constants(rank_part(b.ranks, shared)), **a.constants(rank_part(a.ranks, shared)),
        R_TOTAL=b.columns, FUSED=fused, GELU=gelu,
        PADDED=padded_tokens, COLUMNS=BLOCK_I, BLOCK_T=block_t, ROUNDS=rounds, num_warps=4, num_stages=1,
        **capped, **dependent(gemm_STN),
    )  # fmt: skip
