"""From the q/k/v GEMM's output to rotated queries and the paged KV cache, in one launch.

For each head of each token: 1/rms, global scale, LoRA B, bias, norms of heads, rotary embedding, a factor of
queries by their position; queries go to a buffer, keys and values to their slots in the cache.

KV cache: [blocks, kv heads, 64 tokens, head size] for keys and the same for values, so that one program of
the attention kernel reads a block's keys of one head as one contiguous piece. It is bf16, or E4M3 without a
scale, which holds up to 448; larger numbers are clamped.

Element i of a head is rotated with element i + stride, for every i below pairs. A program holds a head as two
halves, the first and the second elements of all pairs, each followed by elements that are not rotated.

Where attention's output has a gate, the product has a query head's gate after its query, of the same width.
Separate programs finish the gates here, and `combine_splits` multiplies by them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qerl.errors import QeRLError
from qerl.kernels.decode.common import (
    begin,
    both,
    in_head,
    inverse_rms,
    load_b,
    load_head,
    load_xa,
    partial_counts,
    sum_partials,
    times_b,
)
from qerl.kernels.decode.launch import NO_B, LoraB
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import rank_part


@dataclass(frozen=True)
class Heads:
    """Operations on heads between the product and attention; by default whole heads are rotated.

    Attributes:
        norm_N: fp32 weights of the norms of queries and keys: of each head, [2, E], or of all heads together,
            [(query heads + kv heads) E]; None without.
        squares_PT: With a norm of all heads together, sums of squares of the product's blocks of columns.
        v_norm: True if each head of values is normalised, without a weight.
        k_is_v: True if the product has no values: its keys serve as values.
        fused: True if one linear with one adapter makes all of the product.
        turned: Pairs, and the distance between the two of a pair; (0, 0) for none, None for halves.
        position_scale: (beta, n): queries at position p are multiplied by 1 + beta ln(1 + floor(p / n)).
        gated: True if the product has the gate of each query head's output after the head's query.

    Raises:
        QeRLError: Gated heads have a norm of all heads together, whose sums would include the gates.
    """

    norm_N: torch.Tensor | None = None
    squares_PT: torch.Tensor | None = None
    v_norm: bool = False
    k_is_v: bool = False
    fused: bool = False
    turned: tuple[int, int] | None = None
    position_scale: tuple[float, int] | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        if self.gated and self.squares_PT is not None:
            raise QeRLError(
                "Heads was given gated heads with a norm of all heads together, which rope_kv does not "
                "compute; give each head a norm of its own."
            )


PLAIN = Heads()


@triton.jit
def head_norm(x1, x2, E: tl.constexpr, eps):
    """1 / rms of each token's head, from its two halves."""
    return 1.0 / tl.sqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / E + eps)


@triton.jit
def norm_of_all(squares_PT, part, t, in_t, T, eps, Q, K, COLUMNS: tl.constexpr, P_PADDED: tl.constexpr):
    """1 / rms of each token over all its queries, or all its keys, from sums over blocks of columns."""
    p = tl.arange(0, P_PADDED)
    first = tl.where(part == 0, 0, Q // COLUMNS)
    width = tl.where(part == 0, Q, K)
    mine = (p >= first) & (p < first + width // COLUMNS)
    at = squares_PT + p[:, None] * T + t[None, :]
    squares = tl.load(at, mask=mine[:, None] & in_t[None, :], other=0.0)
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)


@triton.jit
def _rope_kv(
    gemm_STN, partials_G, scale_L, squares_PT, xa_TR, b_NR, bias_N, norm_N, heads_PT,
    cos_MP, sin_MP, position_T, slot_T, q_THE, gate_THE, k_cache, v_cache,
    T, N, D, eps, scale_beta, scale_positions,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, R: tl.constexpr, PART: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, E: tl.constexpr, HALF_PADDED: tl.constexpr, PAGE: tl.constexpr,
    HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr, COLUMNS: tl.constexpr, ALL_PADDED: tl.constexpr,
    V_NORM: tl.constexpr, K_IS_V: tl.constexpr, FUSED: tl.constexpr,
    PAIRS: tl.constexpr, STRIDE: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr,
    BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    HALF: tl.constexpr = E // 2
    e = tl.arange(0, HALF_PADDED)
    in_e = in_head(e, HALF)
    every = e < HALF
    if STRIDE == HALF or PAIRS == 0:
        e1 = e
        apart = HALF
        across = HALF
    else:
        e1 = tl.where(e < PAIRS, e, e + PAIRS)
        apart = tl.where(e < PAIRS, PAIRS, HALF - PAIRS)
        across = apart[None, :]
    part = tl.where(head < HQ, 0, tl.where(head < HQ + HKV, 1, 2))
    column = head
    linear = part
    if K_IS_V:
        column = tl.where(part == 2, head - HKV, head)
        linear = tl.minimum(part, 1)
    LINEARS: tl.constexpr = 1 if FUSED else 2 if K_IS_V else 3
    if GATED:  # queries and gates in turn, then keys and values; programs of gates are the last
        gate_head = head - HQ - 2 * HKV
        of_gate = gate_head >= 0
        column = tl.where(of_gate, 2 * gate_head + 1, tl.where(part == 0, 2 * head, column + HQ))
        linear = tl.where(of_gate, 0, linear)
    if FUSED:
        linear = 0
    n1 = column * E + e1
    n2 = n1 + apart
    scale = tl.load(scale_L + linear)
    counts1, counts2 = partial_counts(partials_G, n1, every, S), partial_counts(partials_G, n2, every, S)
    if R > 0:
        b1 = load_b(b_NR, n1, every, 0, R, PART)
        b2 = load_b(b_NR, n2, every, 0, R, PART)
    if HAS_BIAS:
        bias1 = load_head(bias_N + n1, in_e).to(tl.float32)
        bias2 = load_head(bias_N + n2, in_e).to(tl.float32)
    slot = tl.load(slot_T + t, mask=in_t, other=-1)
    position = tl.load(position_T + t, mask=in_t, other=0)
    if PAIRS > 0:
        angle = position[:, None] * PAIRS + e[None, :]
        if PAIRS == HALF:
            cos, sin = load_head(cos_MP + angle, in_e), load_head(sin_MP + angle, in_e)
        else:
            turns = (e < PAIRS)[None, :]
            cos = tl.load(cos_MP + angle, mask=turns, other=1.0)
            sin = tl.load(sin_MP + angle, mask=turns, other=0.0)
    begin(PDL)
    # All loads stand before the sum over warps, whose barriers none of them would pass.
    x1 = sum_partials(gemm_STN, counts1, t, in_t, n1, every, T, N, S) * scale
    x2 = sum_partials(gemm_STN, counts2, t, in_t, n2, every, T, N, S) * scale
    if R > 0:
        xa = load_xa(xa_TR, linear * R, t, in_t, LINEARS * R, PART)
    rms = inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)
    if R > 0:
        x1 += times_b(xa, xa_TR, linear * R, b1, b_NR, n1, every, t, in_t, LINEARS * R, R, PART)
        x2 += times_b(xa, xa_TR, linear * R, b2, b_NR, n2, every, t, in_t, LINEARS * R, R, PART)
    x1 *= rms[:, None]
    x2 *= rms[:, None]
    if HAS_BIAS:
        x1 += bias1[None, :]
        x2 += bias2[None, :]
    if GATED and of_gate:
        to = gate_THE + (t[:, None] * HQ + gate_head) * E + e1[None, :]
        tl.store(to, x1, mask=both(in_t[:, None], in_e))
        tl.store(to + across, x2, mask=both(in_t[:, None], in_e))
        return
    if part < 2:
        if QK_NORM == 1:
            weight = norm_N + part * E
            norm = head_norm(x1, x2, E, eps)
            x1 = x1 * norm[:, None] * load_head(weight + e1, in_e)[None, :]
            x2 = x2 * norm[:, None] * load_head(weight + e1 + apart, in_e)[None, :]
        if QK_NORM == 2:
            norm = norm_of_all(heads_PT, part, t, in_t, T, eps, HQ * E, HKV * E, COLUMNS, ALL_PADDED)
            x1 = x1 * norm[:, None] * load_head(norm_N + n1, in_e)[None, :]
            x2 = x2 * norm[:, None] * load_head(norm_N + n2, in_e)[None, :]
        if PAIRS > 0:
            turned = x1 * cos - x2 * sin
            x2 = x2 * cos + x1 * sin
            x1 = turned
    elif V_NORM:
        norm = head_norm(x1, x2, E, eps)
        x1 *= norm[:, None]
        x2 *= norm[:, None]
    if part == 0:
        if SCALED:  # rounded as transformers does
            factor = 1.0 + scale_beta * tl.log(1.0 + (position // scale_positions).to(tl.float32))
            factor = factor.to(q_THE.dtype.element_ty).to(tl.float32)
            x1 *= factor[:, None]
            x2 *= factor[:, None]
        to = q_THE + (t[:, None] * HQ + head) * E + e1[None, :]
        inside = both(in_t[:, None], in_e)
        tl.store(to, x1.to(q_THE.dtype.element_ty), mask=inside)
        tl.store(to + across, x2.to(q_THE.dtype.element_ty), mask=inside)
    else:
        kv_head = head - HQ - (part - 1) * HKV
        page = (slot // PAGE).to(tl.int64)
        cached = ((page * HKV + kv_head) * PAGE + slot % PAGE)[:, None] * E + e1[None, :]
        written = both((slot >= 0)[:, None], in_e)
        if k_cache.dtype.element_ty == tl.float8e4nv:
            # A NaN must stay one: the sequence that sees it ends with a reason.
            x1 = tl.clamp(x1, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            x2 = tl.clamp(x2, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if part == 1:
            tl.store(k_cache + cached, x1.to(k_cache.dtype.element_ty), mask=written)
            tl.store(k_cache + cached + across, x2.to(k_cache.dtype.element_ty), mask=written)
        else:
            tl.store(v_cache + cached, x1.to(v_cache.dtype.element_ty), mask=written)
            tl.store(v_cache + cached + across, x2.to(v_cache.dtype.element_ty), mask=written)


@triton.jit
def _find_slots(
    limit_2T, table_T, tables_GB, slot_T, T, width,
    PAGE: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    begin(PDL)
    place = tl.load(limit_2T + T + t, mask=in_t, other=0) - 1
    table = tl.load(table_T + t, mask=in_t, other=0)
    if PAGE == 0:  # a block has no places
        slot = tl.load(tables_GB + table * width, mask=place >= 0, other=0)
    else:
        page = tl.load(tables_GB + table * width + place // PAGE, mask=place >= 0, other=0)
        slot = page * PAGE + place % PAGE
    tl.store(slot_T + t, tl.where(place >= 0, slot, -1), mask=in_t)


def find_slots(
    limit_2T: torch.Tensor,
    table_T: torch.Tensor,
    tables_GB: torch.Tensor,
    slot_T: torch.Tensor,
    page: int | None,
) -> None:
    """Write the slot of each token's key and value in a pool: block * block tokens + offset; -1: none.

    Args:
        limit_2T: int32 [2, T]: the token's own place is the last of the second limit; 0 for a token without
            one.
        table_T: int32, the row of ``tables_GB`` that lists the blocks of each token's sequence.
        tables_GB: int32 block tables of the pool.
        slot_T: int32, written.
        page: Tokens of a block; None where a sequence has one block, its state, whose number is the slot.
    """
    tokens, block_t = len(slot_T), 128
    _find_slots[(triton.cdiv(tokens, block_t),)](
        limit_2T, table_T, tables_GB, slot_T, tokens, tables_GB.shape[1],
        PAGE=page or 0, BLOCK_T=block_t, **dependent(slot_T),
    )  # fmt: skip


def rope_kv(
    gemm_STN: torch.Tensor,
    scale_L: torch.Tensor,
    squares_PT: torch.Tensor,
    cos_MP: torch.Tensor,
    sin_MP: torch.Tensor,
    position_T: torch.Tensor,
    slot_T: torch.Tensor,
    q_THE: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    width: int,
    eps: float,
    heads: Heads = PLAIN,
    gate_THE: torch.Tensor | None = None,
    partials_G: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    b: LoraB = NO_B,
) -> None:
    """Write queries and gates to buffers, and keys and values to their slots in the cache.

    Args:
        gemm_STN: fp32 or bf16 [S, T, N], N at least (query heads + 2 kv heads) * head size; kv heads count
            once where keys serve as values, and query heads twice with gates.
        scale_L: fp32 factors of the product's linears.
        squares_PT: Partial sums of squares from :func:`residual_norm`; empty where the input has no norm.
        cos_MP, sin_MP: fp32 [positions, pairs].
        position_T: int32 position of each token.
        slot_T: int32, the slot of each token's key and value, as `find_slots` writes it.
        q_THE: bf16 [T, query heads, head size], written.
        k_cache, v_cache: [blocks, kv heads, block tokens, head size], written.
        width: Hidden size, over which the mean square is taken.
        eps: Added to the mean square, as the RMSNorms do.
        heads: Other operations on heads.
        gate_THE: fp32, of the shape of the queries, written if heads have gates; None if they have none.
        partials_G: int32, how many of the S partial sums each 64 columns have; None if S is 1.
        bias_N: Bias of q, k, v, any floating dtype.
        b: LoRA of q, k and v: their stacked B, and the sum x A^T [T, 3 R] of all; [T, 2 R] where keys
            serve as values, [T, R] if fused.

    Raises:
        QeRLError: A tensor is not contiguous, or ``gate_THE`` does not match `Heads.gated`.
    """
    if heads.gated != (gate_THE is not None):
        given = "no" if gate_THE is None else "a"
        raise QeRLError(
            f"rope_kv was given {given} gate_THE for heads with gated={heads.gated}; pass an fp32 buffer of "
            "q_THE's shape for gated heads, and None for others."
        )
    splits, tokens, columns = gemm_STN.shape
    count, size = q_THE.shape[1:]
    kv_heads, page = k_cache.shape[1:3]
    block_t, shared = 16, shared_bytes(q_THE)
    squares, sums = squares_PT.shape[0], heads.squares_PT
    pairs, stride = heads.turned or (size // 2, size // 2)
    beta, positions = heads.position_scale or (0.0, 1)
    norm = 0 if heads.norm_N is None else 1 if sums is None else 2
    arguments = pointers(
        "rope_kv", gemm_STN, gemm_STN=gemm_STN, partials_G=partials_G, scale_L=scale_L,
        squares_PT=squares_PT, xa_TR=b.xa.sum_TR, b_NR=b.b_NR, bias_N=bias_N, norm_N=heads.norm_N,
        heads_PT=sums, cos_MP=cos_MP, sin_MP=sin_MP, position_T=position_T, slot_T=slot_T,
        q_THE=q_THE, gate_THE=gate_THE, k_cache=k_cache, v_cache=v_cache,
    )  # fmt: skip
    _rope_kv[(count + 2 * kv_heads + count * heads.gated, triton.cdiv(tokens, block_t))](
        *arguments, tokens, columns, width, eps, beta, positions,
        S=splits, SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        **b.constants(rank_part(b.ranks, shared)),
        HQ=count, HKV=kv_heads, E=size, HALF_PADDED=triton.next_power_of_2(size // 2), PAGE=page,
        HAS_BIAS=bias_N is not None, QK_NORM=norm,
        COLUMNS=1 if sums is None else columns // sums.shape[0],
        ALL_PADDED=1 if sums is None else triton.next_power_of_2(sums.shape[0]),
        V_NORM=heads.v_norm, K_IS_V=heads.k_is_v, FUSED=heads.fused,
        PAIRS=pairs, STRIDE=stride, SCALED=heads.position_scale is not None, GATED=heads.gated,
        BLOCK_T=block_t, num_warps=4, **dependent(gemm_STN),
    )  # fmt: skip
