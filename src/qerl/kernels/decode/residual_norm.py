"""Residual add, RMSNorm weight and LoRA between one sublayer and the next, in one launch.

    y = residual + gain * (scale * GEMM + (h A_out^T) B_out^T)  (or gain * embedding, at the first layer)
    u = y * w, the next GEMM's input; 1/rms(y) is applied by the reader of that GEMM
    partial sums of y^2 and of u A_in^T per block of columns

The sublayer's output may have a norm of its own, and y may be multiplied by a scalar of the layer. Instead of
a GEMM's output, the results of a token's experts may be added, by weight.

w is fp32 and may carry noise. The residual stream is fp32: rounding it to bf16 after every sublayer causes
most of the error of a bf16 forward pass, and here the bytes hardly count.
"""

from dataclasses import dataclass

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
from qerl.kernels.limits import rank_part, stacked_part


def block_d(tokens: int) -> int:
    """Return the columns per program: few for few tokens, so that all multiprocessors take part; more for
    many, because every program adds its share of x A^T for each token."""
    return 64 if tokens <= 32 else 128


def _tile(tokens: int, ranks: int) -> tuple[int, int, dict[str, int]]:
    """Return the tokens and warps of a program, and launch options. With many tokens a program of 32 reads A
    and B half as often as one of 16, and 128 registers per thread let two programs of 8 warps share a
    multiprocessor: at 256 tokens of 7B all programs run at once."""
    if tokens > 128 and ranks <= 128:
        return 32, 8, {"maxnreg": 128}
    return 16, 4 if ranks <= 128 else 8, {}


@dataclass(frozen=True, eq=False)
class Chosen:
    """Results of experts, and which of them are added for each token.

    Attributes:
        out_SD: fp32, of all places.
        place_TC: int32, the places of each token's experts.
        factor_TC: fp32, the factor of each result.
        expert_TC: int32, each token's experts.
        bias_ED: fp32, added to an expert's result before it is multiplied; None for nothing.
        shared_T: fp32, factor of the output of a GEMM that is added as well; None without one.
    """

    out_SD: torch.Tensor
    place_TC: torch.Tensor
    factor_TC: torch.Tensor
    expert_TC: torch.Tensor
    bias_ED: torch.Tensor | None = None
    shared_T: torch.Tensor | None = None


@triton.jit
def add_chosen(
    out_SD,
    place_TC,
    factor_TC,
    expert_TC,
    bias_ED,
    t,
    in_t,
    d,
    inside,
    D,
    C: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The results of a token's experts by weight, in their order."""
    total = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for c in tl.static_range(C):
        place = tl.load(place_TC + t * C + c, mask=in_t, other=0).to(tl.int64)
        factor = tl.load(factor_TC + t * C + c, mask=in_t, other=0.0)
        result = tl.load(out_SD + place[:, None] * D + d[None, :], mask=inside, other=0.0)
        if BIAS:
            expert = tl.load(expert_TC + t * C + c, mask=in_t, other=0).to(tl.int64)
            result += tl.load(bias_ED + expert[:, None] * D + d[None, :], mask=inside, other=0.0)
        total += result * factor[:, None]
    return total


@triton.jit
def _residual_norm(
    gemm_STN, partials_G, scale_1, xa_TR, b_NR, table_VD, tokens_T,
    residual_TD, w_D, behind_D, behind_PT, scalar_1, chosen_SD, place_TC, factor_TC,
    expert_TC, bias_ED, shared_T,
    a_RK, u_TD, squares_PT, parts_PTR, T, D, N, gain, eps,
    BEHIND_P: tl.constexpr, BEHIND_PADDED: tl.constexpr, GAIN: tl.constexpr, SCALAR: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr, PART: tl.constexpr,
    A_RANKS: tl.constexpr, A_PART: tl.constexpr,
    EMBED: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_BIAS: tl.constexpr, SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t, in_d = t < T, d < D
    inside = in_t[:, None] & in_d[None, :]
    at = t[:, None].to(tl.int64) * D + d[None, :]
    # A row rather than numbers: those would go through shared memory, and what is loaded after them wait.
    w = tl.load(w_D + d[None, :], mask=in_d[None, :], other=0.0)
    if not EMBED:
        y = tl.load(residual_TD + at, mask=inside, other=0.0)
    if R > 0:
        b = load_b(b_NR, d, in_d, 0, R, PART)
    if A_RANKS > 0:
        a = load_a(a_RK, 0, d, in_d, D, A_RANKS, A_PART)
    if not EMBED and (CHOSEN == 0 or SHARED):
        scale = tl.load(scale_1)
        counts = partial_counts(partials_G, d, in_d, S)
    begin(PDL)
    if R > 0:  # with the product's, of which there may be more than registers hold at once
        xa = load_xa(xa_TR, 0, t, in_t, R, PART)
    if EMBED:
        token = tl.load(tokens_T + t, mask=in_t, other=0).to(tl.int64)
        y = tl.load(table_VD + token[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        if GAIN:
            y *= gain
    elif CHOSEN > 0:
        added = add_chosen(
            chosen_SD, place_TC, factor_TC, expert_TC, bias_ED, t, in_t, d, inside, D, CHOSEN, CHOSEN_BIAS
        )
        if SHARED:
            out = sum_partials(gemm_STN, counts, t, in_t, d, in_d, T, N, S) * scale
            if R > 0:
                out += times_b(xa, xa_TR, 0, b, b_NR, d, in_d, t, in_t, R, R, PART)
            added += out * tl.load(shared_T + t, mask=in_t, other=0.0)[:, None]
        y += gain * added
    elif BEHIND_P > 0 or GAIN:
        out = sum_partials(gemm_STN, counts, t, in_t, d, in_d, T, N, S) * scale
        if R > 0:
            out += times_b(xa, xa_TR, 0, b, b_NR, d, in_d, t, in_t, R, R, PART)
        if BEHIND_P > 0:
            rms = inverse_rms(behind_PT, t, in_t, T, D, eps, BEHIND_P, BEHIND_PADDED)
            out *= rms[:, None] * tl.load(behind_D + d, mask=in_d, other=0.0)[None, :]
        y += out * gain
    else:  # straight onto the stream: 0.8 us less at 64 tokens
        y += sum_partials(gemm_STN, counts, t, in_t, d, in_d, T, N, S) * scale
        if R > 0:
            y += times_b(xa, xa_TR, 0, b, b_NR, d, in_d, t, in_t, R, R, PART)
    if SCALAR:
        y *= tl.load(scalar_1)
    tl.store(residual_TD + at, y, mask=inside)
    tl.store(squares_PT + block * T + t, tl.sum(y * y, axis=1), mask=in_t)
    u = (y * w).to(u_TD.dtype.element_ty)
    store_operand(u_TD, u, t, d, inside, D, PADDED)
    if A_RANKS > 0:
        apply_a(parts_PTR, block, u, a, a_RK, d, in_d, D, t, in_t, T, A_RANKS, A_PART)


def residual_norm(
    residual_TD: torch.Tensor,
    w_D: torch.Tensor,
    u_TD: torch.Tensor,
    squares_PT: torch.Tensor,
    *,
    padded_tokens: int = 0,
    gemm_STN: torch.Tensor | None = None,
    partials_G: torch.Tensor | None = None,
    scale_1: torch.Tensor | None = None,
    embedding: tuple[torch.Tensor, torch.Tensor] | None = None,
    chosen: Chosen | None = None,
    behind: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    gain: float = 1.0,
    scalar_1: torch.Tensor | None = None,
    b: LoraB = NO_B,
    a: LoraA = NO_A,
) -> None:
    """Add a sublayer's output, or the embedding, to the residual stream and apply the next norm's weight.

    Args:
        residual_TD: Residual stream, fp32, updated in place.
        w_D: RMSNorm weight, fp32.
        u_TD: bf16, written, [T, D] or in the order of ``packed_gemm``.
        squares_PT: fp32 [ceil(D / block_d(T)), T], written.
        padded_tokens: Tokens that ``u_TD`` has room for in the order of ``packed_gemm``; 0 for [T, D].
        gemm_STN: The sublayer's GEMM output, fp32 or bf16 [S, T, N >= D]; None with ``embedding``.
        partials_G: int32, how many of the S partial sums each 64 columns have; None if S is 1.
        scale_1: fp32 [1], multiplies the GEMM's output.
        embedding: (table [V, D], token ids [T]), instead of a GEMM.
        chosen: Results of experts, instead of a GEMM or added to that of a shared MLP; not with ``behind``.
        behind: (weight, fp32 [D]; partial sums of squares of the GEMM's output) of a norm of the sublayer's
            output.
        eps: Added to the mean square by that norm.
        gain: Multiplies the sublayer's output, or the embedding.
        scalar_1: fp32 [1], multiplies the sum.
        b: LoRA of the sublayer's GEMM.
        a: LoRA of the next GEMM.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, width = residual_TD.shape
    columns, shared = block_d(tokens), shared_bytes(residual_TD)
    block_t, warps, capped = _tile(tokens, a.ranks)
    table, ids = embedding or (None, None)
    chosen_SD = place_TC = factor_TC = expert_TC = bias_ED = shared_T = None
    if chosen is not None:
        chosen_SD, place_TC, factor_TC = chosen.out_SD, chosen.place_TC, chosen.factor_TC
        expert_TC, bias_ED, shared_T = chosen.expert_TC, chosen.bias_ED, chosen.shared_T
    behind_D, behind_PT = behind or (None, None)
    normed = 0 if behind_PT is None else behind_PT.shape[0]
    arguments = pointers(
        "residual_norm", residual_TD, gemm_STN=gemm_STN, partials_G=partials_G, scale_1=scale_1,
        xa_TR=b.xa.sum_TR, b_NR=b.b_NR, table_VD=table, tokens_T=ids, residual_TD=residual_TD, w_D=w_D,
        behind_D=behind_D, behind_PT=behind_PT, scalar_1=scalar_1, chosen_SD=chosen_SD, place_TC=place_TC,
        factor_TC=factor_TC, expert_TC=expert_TC, bias_ED=bias_ED, shared_T=shared_T, a_RK=a.a_RK, u_TD=u_TD,
        squares_PT=squares_PT, parts_PTR=a.xa.parts_PTR,
    )  # fmt: skip
    _residual_norm[(triton.cdiv(width, columns), triton.cdiv(tokens, block_t))](
        *arguments, tokens, width, width if gemm_STN is None else gemm_STN.shape[2],
        gain, eps,
        BEHIND_P=normed, BEHIND_PADDED=triton.next_power_of_2(normed), GAIN=gain != 1.0,
        SCALAR=scalar_1 is not None,
        S=1 if gemm_STN is None else gemm_STN.shape[0],
        **b.constants(rank_part(b.ranks, shared)), **a.constants(stacked_part(a.ranks, shared)),
        EMBED=embedding is not None, CHOSEN=0 if place_TC is None else place_TC.shape[1],
        CHOSEN_BIAS=bias_ED is not None, SHARED=shared_T is not None,
        PADDED=padded_tokens, BLOCK_T=block_t, BLOCK_D=columns, num_warps=warps, **capped,
        **dependent(residual_TD),
    )  # fmt: skip
