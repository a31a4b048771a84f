"""silu(gate) * up, or GELU(gate) * up, with LoRA on both, and down's x A^T, in one launch.

With few tokens a program takes 16 or 32 of them and 128 columns of the intermediate size, and loads its
weights before the product has ended. With many, bytes and instructions take the time instead: a program takes
64 tokens and walks along a run of columns, with as many programs as the multiprocessors hold at once. Values
per token (1/rms, x A^T) are then read once for all columns, and the A and B of columns once for 64 tokens;
the next columns are loaded while other programs compute, and the sum over a run is one part of down's x A^T.
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
from qerl.kernels.device import multiprocessors
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import rank_part


@triton.jit
def activated(gate, up, GELU: tl.constexpr):
    """activation(gate) * up, with a sigmoid that takes no care of denormal numbers."""
    bent = gate
    if GELU:
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * bent))  # log2(e)
    return gate * (root * root) * up


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
        h = activated(gate * rms[:, None], up * rms[:, None], GELU).to(h_TI.dtype.element_ty)
        store_operand(h_TI, h, t, n, in_t[:, None] & in_n[None, :], INNER, PADDED)
        if A_RANKS > 0:
            apply_a(parts_PTR, block, h, a, a_RK, n, in_n, INNER, t, in_t, T, A_RANKS, A_PART)


@triton.jit
def sum_of_block(gemm_STN, count, t, n, T, N, S: tl.constexpr):
    """Tile of a GEMM's output whose columns have one number of partial sums, fp32."""
    total = tl.load(gemm_STN + t[:, None].to(tl.int64) * N + n[None, :]).to(tl.float32)
    for s in tl.static_range(1, S):
        at = gemm_STN + (s * T + t[:, None]).to(tl.int64) * N + n[None, :]
        there = (tl.full(n.shape, s, tl.int32) < count)[None, :]
        part = tl.load(at, mask=there, other=0.0)
        if s < count:
            total += part.to(tl.float32)
    return total


@triton.jit
def add_lora(
    y, xa, xa_TR, first, factor, b_NR, n, t, R_TOTAL: tl.constexpr, R: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """y + factor (x A^T) B^T; ``xa`` is the first part of factor (x A^T)."""
    all_n, all_t = tl.full(n.shape, 1, tl.int1), tl.full(t.shape, 1, tl.int1)
    for more in tl.static_range(0, R, PART):
        if more > 0:
            xa = load_xa(xa_TR, first + more, t, all_t, R_TOTAL, PART) * factor
        b = load_b(b_NR, n, all_n, more, R, PART)
        y = tl.dot(xa.to(b.dtype), tl.trans(b), y, out_dtype=tl.float32)
    return y


@triton.jit
def _act_mul_of_many(
    gemm_STN, partials_G, scale_2, squares_PT, xa_TR, b_NR, a_RK, h_TI, parts_PTR,
    T, N, INNER, D, eps,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr,
    R: tl.constexpr, R_TOTAL: tl.constexpr, PART: tl.constexpr, A_RANKS: tl.constexpr,
    FUSED: tl.constexpr, GELU: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = INNER // COLUMNS
    first, last = program * blocks // programs, (program + 1) * blocks // programs
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t, all_t = t < T, tl.full([BLOCK_T], 1, tl.int1)
    here = tl.minimum(t, T - 1)  # of tokens beyond the last, which is then read again, nothing is written
    LINEARS: tl.constexpr = 1 if FUSED else 2
    UP: tl.constexpr = (LINEARS - 1) * R
    PER_GROUP: tl.constexpr = 64 // COLUMNS
    gate_scale, up_scale = tl.load(scale_2), tl.load(scale_2 + LINEARS - 1)
    gate_count, up_count = 1, 1
    if S > 1:
        gate_counts, up_counts = partials_G, partials_G + INNER // 64
        at_first = first // PER_GROUP
        gate_count, up_count = tl.load(gate_counts + at_first), tl.load(up_counts + at_first)
    begin(PDL)
    if R > 0:  # ahead of the sum over warps, as above
        gate_xa = load_xa(xa_TR, 0, here, all_t, R_TOTAL, PART)
        up_xa = load_xa(xa_TR, UP, here, all_t, R_TOTAL, PART)
    rms = inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)[:, None]
    if R > 0:
        gate_xa, up_xa = (gate_xa * rms).to(b_NR.dtype.element_ty), (up_xa * rms).to(b_NR.dtype.element_ty)
    if A_RANKS > 0:
        r = tl.arange(0, A_RANKS)
        total = tl.zeros([BLOCK_T, A_RANKS], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        n = block * COLUMNS + tl.arange(0, COLUMNS)
        gate = sum_of_block(gemm_STN, gate_count, here, n, T, N, S) * (rms * gate_scale)
        up = sum_of_block(gemm_STN, up_count, here, INNER + n, T, N, S) * (rms * up_scale)
        if S > 1:  # of the next block, for whose loads they have to be there
            following = tl.minimum(block + 1, blocks - 1) // PER_GROUP
            gate_count, up_count = tl.load(gate_counts + following), tl.load(up_counts + following)
        if R > 0:
            gate = add_lora(gate, gate_xa, xa_TR, 0, rms, b_NR, n, here, R_TOTAL, R, PART)
            up = add_lora(up, up_xa, xa_TR, UP, rms, b_NR, INNER + n, here, R_TOTAL, R, PART)
        h = activated(gate, up, GELU).to(h_TI.dtype.element_ty)
        store_operand(h_TI, h, t, n, in_t[:, None], INNER, PADDED)
        if A_RANKS > 0:
            a = tl.load(a_RK + r[:, None] * INNER + n[None, :])
            total = tl.dot(h, tl.trans(a), total, out_dtype=tl.float32)
    if A_RANKS > 0:
        tl.store(parts_PTR + (program * T + t[:, None]) * A_RANKS + r[None, :], total, mask=in_t[:, None])


FEW = 64
"""Maximum tokens for which a program takes some of them and one block of columns; steps of 64 become slower
if programs walk, and those of 128 faster (ways-7b-between-few-h200.json)."""

_FEW_COLUMNS = 128

_TOKENS, _ROW_BYTES = 64, 128
"""With many: tokens of a program, and bytes of a partial sum's row that it loads at once."""

_RESIDENT = {32: 3, 64: 2}
"""Programs that a Hopper multiprocessor holds at once, by maximum ranks of down's A; with more ranks, one."""


def _walks(tokens: int, intermediate: int) -> bool:
    return tokens > FEW and intermediate % 64 == 0


def programs(intermediate: int, tokens: int, ranks: int, device: torch.device) -> int:
    """Return the number of programs side by side, each with its own columns and part of down's x A^T.

    Args:
        intermediate: I.
        tokens: T.
        ranks: Ranks of down's A; 0 without.
        device: Device that runs the kernel.
    """
    if not _walks(tokens, intermediate):
        return triton.cdiv(intermediate, _FEW_COLUMNS)
    resident = next((count for most, count in _RESIDENT.items() if ranks <= most), 1)
    at_once = resident * multiprocessors(device) // triton.cdiv(tokens, _TOKENS)
    # A long pass has more programs than run at once, so that their last wave is short.
    return min(intermediate // 64, max(at_once, triton.cdiv(intermediate, 1024)))


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
        scale_2: fp32 factors of gate and up; one factor where they are one linear.
        squares_PT: Partial sums of squares from :func:`residual_norm`.
        h_TI: bf16, written, [T, I] or in the order of ``packed_gemm``.
        intermediate: I.
        width: Hidden size, over which the mean square is taken.
        eps: Added to the mean square, as the RMSNorm does.
        gelu: Whether the activation is GELU, in its tanh approximation, instead of SiLU.
        fused: True if one linear with one adapter makes both.
        padded_tokens: Tokens that ``h_TI`` has room for in the order of ``packed_gemm``; 0 for [T, I].
        partials_G: int32, how many of the S partial sums each 64 columns have; None if S is 1.
        b: LoRA of gate and up: their stacked B, gate first, and the sum x A^T [T, 2 R] of both, or [T, R] if
            they are one linear; further columns belong to other linears.
        a: LoRA of down.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    splits, tokens, columns = gemm_STN.shape
    squares = squares_PT.shape[0]
    arguments = pointers(
        "act_mul", h_TI, gemm_STN=gemm_STN, partials_G=partials_G, scale_2=scale_2, squares_PT=squares_PT,
        xa_TR=b.xa.sum_TR, b_NR=b.b_NR, a_RK=a.a_RK, h_TI=h_TI, parts_PTR=a.xa.parts_PTR,
    )  # fmt: skip
    shared, count = shared_bytes(h_TI), programs(intermediate, tokens, a.ranks, h_TI.device)
    common = {
        "S": splits, "SQ_P": squares, "SQ_PADDED": triton.next_power_of_2(squares),
        **b.constants(rank_part(b.ranks, shared)), "R_TOTAL": b.columns, "FUSED": fused, "GELU": gelu,
        "PADDED": padded_tokens,
    }  # fmt: skip
    if _walks(tokens, intermediate):
        large = max(a.ranks, b.ranks) > 64
        _act_mul_of_many[(count, triton.cdiv(tokens, _TOKENS))](
            *arguments, tokens, columns, intermediate, width, eps, **common, A_RANKS=a.ranks,
            COLUMNS=_ROW_BYTES // gemm_STN.itemsize, BLOCK_T=_TOKENS,
            # The next block of large ranks would take more shared memory than any card has.
            STAGES=1 if large else 2, num_warps=8 if large else 4, **dependent(gemm_STN),
        )  # fmt: skip
        return
    block_t, rounds = 16, min(2, triton.cdiv(tokens, 32))  # 32 tokens at once spill registers
    _act_mul[(count, triton.cdiv(tokens, block_t * rounds))](
        *arguments, tokens, columns, intermediate, width, eps,
        **common, **a.constants(rank_part(a.ranks, shared)),
        COLUMNS=_FEW_COLUMNS, BLOCK_T=block_t, ROUNDS=rounds, num_warps=4, num_stages=1,
        **dependent(gemm_STN),
    )  # fmt: skip
