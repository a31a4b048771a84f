"""A mixture's layer between its products: the router's choice of experts, and the experts' inputs.

    expert, weight = top(softmax(u W_router^T / rms + bias))  # route; the norm before has left u W_router^T
    items                                              # arrange: each an expert and some of its tokens
    x = u of the item's tokens                         # spread
    gate, up = x W_expert^T                            # qerl.kernels.weights.experts
    h = act(gate) * up                                 # act_items; biases and clamps as the family has them
    y = h W_expert^T                                   # the same; residual_norm adds a token's y by weight

An item is an expert with at most M of its tokens, in M places, the last of which may be empty. Products go
through all items, whose number only the GPU knows; buffers have room for the maximum number (`most_items`).
The tokens of an expert are in the order of the batch, and a token's experts in the order of their weight, so
nothing here depends on timing.

The product after `spread` reads the items and requests its weights before its wait, so `spread` lets it start
only when `arrange` has ended (`begin_late`). The second product starts after the first one's wait, like all
others.

Given up: gathering the experts' inputs inside the product. That would save one launch of a layer's twelve,
but the product's loads of whole tiles, 1 KiB at a time, would become loads of 16 bytes.

Shapes: T tokens, E experts, C chosen per token, J items, M places of an item, S = J M places, D hidden, I
intermediate, P parts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qerl.families.layer import Clamp
from qerl.kernels.decode.common import begin, begin_late, inverse_rms, load_operand, store_operand
from qerl.kernels.launch import dependent, pointers
from qerl.kernels.limits import most_items


@dataclass(frozen=True, eq=False)
class Items:
    """Assignment of tokens to experts, all int32 except the factors; written by :func:`arrange`.

    Attributes:
        size: M.
        item_J2: The expert of each item, and how many of its places have a token.
        count_1: Number of items.
        token_S: The token of each place.
        place_TC: The place of each token for each of its experts.
        factor_TC: fp32 factor of the result at that place: the router's weight times the expert's scale.
    """

    size: int
    item_J2: torch.Tensor
    count_1: torch.Tensor
    token_S: torch.Tensor
    place_TC: torch.Tensor
    factor_TC: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, experts: int, chosen: int, size: int, device: torch.device) -> "Items":
        """Return room for the items of this many tokens."""
        most = most_items(tokens, experts, chosen, size)

        def new(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        factor_TC = torch.zeros(tokens, chosen, device=device)
        return cls(size, new(most, 2), new(1), new(most * size), new(tokens, chosen), factor_TC)


class Kept(NamedTuple):
    """Buffer that keeps the experts that a mixture chooses.

    Attributes:
        slot_T: int32, the slot of each token; -1 for none.
        kept_SMC: uint8, the experts at each slot, of all M mixtures of the model.
        number: Number of the mixture.
    """

    slot_T: torch.Tensor
    kept_SMC: torch.Tensor
    number: int


@triton.jit
def _route(
    parts_PTR, squares_PT, bias_E, expert_TC, weight_TC, shared_T, slot_T, kept, T, D, eps, number, mixtures,
    R, FIRST, KEEPS: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr,
    P: tl.constexpr, P_PADDED: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr,
    E: tl.constexpr, E_PADDED: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    NORMALIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    e, c, p = tl.arange(0, E_PADDED), tl.arange(0, C_PADDED), tl.arange(0, P_PADDED)
    in_e = e < E
    if BIAS:
        bias = tl.load(bias_E + e, mask=in_e, other=0.0)
    begin(PDL)
    at = parts_PTR + (p * T + t) * R + FIRST
    logit = tl.sum(
        tl.load(at[:, None] + e[None, :], mask=(p < P)[:, None] & in_e[None, :], other=0.0), axis=0
    )
    one = t + tl.arange(0, 1)
    rms = tl.sum(inverse_rms(squares_PT, one, one < T, T, D, eps, SQ_P, SQ_PADDED), axis=0)
    logit *= rms
    if SHARED:
        gate = tl.sum(tl.load(at + E, mask=p < P, other=0.0), axis=0)
        tl.store(shared_T + t, tl.sigmoid(gate * rms))
    if BIAS:
        logit += bias
    # A row of the batch that nobody uses may hold NaN, of which no number is the largest.
    logit = tl.where(in_e, tl.where(logit == logit, logit, 0.0), -float("inf"))
    left = tl.exp(logit - tl.max(logit, axis=0))
    left = left / tl.sum(left, axis=0)
    expert = tl.zeros([C_PADDED], tl.int32)
    weight = tl.zeros([C_PADDED], tl.float32)
    for i in tl.static_range(C):
        best = tl.argmax(left, axis=0)
        weight = tl.where(c == i, tl.max(left, axis=0), weight)
        expert = tl.where(c == i, best, expert)
        left = tl.where(e == best, -1.0, left)
    if NORMALIZED:
        weight = weight / tl.sum(weight, axis=0)
    tl.store(expert_TC + t * C + c, expert, mask=c < C)
    tl.store(weight_TC + t * C + c, weight, mask=c < C)
    if KEEPS:
        slot = tl.load(slot_T + t).to(tl.int64)
        if slot >= 0:
            tl.store(kept + (slot * mixtures + number) * C + c, expert.to(tl.uint8), mask=c < C)


def route(
    parts_PTR: torch.Tensor,
    squares_PT: torch.Tensor,
    expert_TC: torch.Tensor,
    weight_TC: torch.Tensor,
    *,
    experts: int,
    normalized: bool,
    width: int,
    eps: float,
    first: int = 0,
    shared_T: torch.Tensor | None = None,
    bias_E: torch.Tensor | None = None,
    kept: Kept | None = None,
) -> None:
    """Write each token's experts, in descending order of weight, and their weights.

    Args:
        parts_PTR: fp32, u W^T in parts or summed; columns from ``first`` on are the router's.
        squares_PT: Partial sums of squares, from which 1/rms is computed.
        expert_TC: int32, written.
        weight_TC: fp32, written.
        experts: E.
        normalized: Whether a token's weights are scaled to a sum of 1.
        width: Hidden size, over which the mean square is taken.
        eps: Added to the mean square, as the RMSNorm does.
        first: The router's first column.
        shared_T: fp32, written: the sigmoid of the column after the router's, the gate of a shared MLP; None
            without one.
        bias_E: fp32, added to the logits.
        kept: Buffer to which the experts of each token are written as well.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    parts, tokens, columns_of_sum = parts_PTR.shape
    chosen, squares = expert_TC.shape[1], squares_PT.shape[0]
    padded, columns = triton.next_power_of_2(parts), triton.next_power_of_2(experts)
    slot_T, kept_SMC, number = kept or (None, None, 0)
    arguments = pointers(
        "route", parts_PTR, parts_PTR=parts_PTR, squares_PT=squares_PT, bias_E=bias_E, expert_TC=expert_TC,
        weight_TC=weight_TC, shared_T=shared_T, slot_T=slot_T, kept=kept_SMC,
    )  # fmt: skip
    _route[(tokens,)](
        *arguments, tokens, width, eps, number, 1 if kept_SMC is None else kept_SMC.shape[-2],
        columns_of_sum, first, KEEPS=kept is not None, BIAS=bias_E is not None,
        SHARED=shared_T is not None,
        P=parts, P_PADDED=padded, SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        E=experts, E_PADDED=columns, C=chosen, C_PADDED=triton.next_power_of_2(chosen),
        NORMALIZED=normalized, num_warps=4 if padded * columns <= 8192 else 8, **dependent(parts_PTR),
    )  # fmt: skip


@triton.jit
def _arrange(
    expert_TC, weight_TC, scale_E, item_J2, count_1, token_S, place_TC, factor_TC,
    PAIRS, C: tl.constexpr, E: tl.constexpr, BINS: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    e = tl.arange(0, BINS)
    scale = tl.load(scale_E + own)
    begin(PDL)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, PAIRS, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        # Beyond the last pair is an expert that there is not.
        counts += tl.histogram(tl.load(expert_TC + pair, mask=pair < PAIRS, other=BINS - 1), BINS)
    counts = tl.where(e < E, counts, 0)
    begins = tl.sum(tl.where(e < own, (counts + M - 1) // M, 0), axis=0)
    mine = tl.sum(tl.where(e == own, counts, 0), axis=0)
    items = (mine + M - 1) // M
    for j in range(items):
        tl.store(item_J2 + (begins + j) * 2, own)
        tl.store(item_J2 + (begins + j) * 2 + 1, tl.minimum(M, mine - j * M))
    if own == E - 1:
        tl.store(count_1, begins + items)
    place = begins * M
    if mine > 0:
        for first in range(0, PAIRS, CHUNK):
            pair = first + tl.arange(0, CHUNK)
            is_mine = tl.load(expert_TC + pair, mask=pair < PAIRS, other=BINS - 1) == own
            number = is_mine.to(tl.int32)
            at = place + tl.cumsum(number, axis=0) - 1
            tl.store(place_TC + pair, at, mask=is_mine)
            tl.store(token_S + at, pair // C, mask=is_mine)
            weight = tl.load(weight_TC + pair, mask=is_mine, other=0.0)
            tl.store(factor_TC + pair, weight * scale, mask=is_mine)
            place += tl.sum(number, axis=0)


def arrange(expert_TC: torch.Tensor, weight_TC: torch.Tensor, scale_E: torch.Tensor, items: Items) -> None:
    """Write the items, in the order of their experts.

    Args:
        expert_TC: int32, the experts of each token.
        weight_TC: fp32, their weights.
        scale_E: fp32, additional factor of each expert's result.
        items: Written.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, chosen = expert_TC.shape
    experts = len(scale_E)
    arguments = pointers(
        "arrange", scale_E, expert_TC=expert_TC, weight_TC=weight_TC, scale_E=scale_E, item_J2=items.item_J2,
        count_1=items.count_1, token_S=items.token_S, place_TC=items.place_TC, factor_TC=items.factor_TC,
    )  # fmt: skip
    chunk = min(1024, triton.next_power_of_2(tokens * chosen))
    _arrange[(experts,)](
        *arguments, tokens * chosen, C=chosen, E=experts,
        BINS=2 * triton.next_power_of_2(experts), M=items.size, CHUNK=chunk, num_warps=4,
        **dependent(weight_TC),
    )  # fmt: skip


@triton.jit
def _spread(
    u_TD, place_TC, x, D, C: tl.constexpr, M: tl.constexpr, SOURCE: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = d < D
    begin_late(PDL)
    place = tl.load(place_TC + pair)
    one = tl.arange(0, 1)
    inside = (one < 1)[:, None] & in_d[None, :]
    u = load_operand(u_TD, pair // C + one, d, inside, D, SOURCE)
    item = x + (place // M).to(tl.int64) * M * D
    store_operand(item, u, place % M + one, d, inside, D, PADDED)


def spread(u: torch.Tensor, width: int, items: Items, x: torch.Tensor, in_order: bool, padded: int) -> None:
    """Write the inputs of all items.

    Args:
        u: Output of the norm, without its 1/rms, [T, D] or in the order of ``packed_gemm``.
        width: D.
        items: As :func:`arrange` has written them.
        x: Written, M rows per item: [M, D] or in the order of ``packed_gemm`` for M tokens.
        in_order: Whether ``x`` is in the order of ``packed_gemm``.
        padded: Tokens that ``u`` has room for in that order; 0 for [T, D].

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    chosen, block = items.place_TC.shape[1], 512
    arguments = pointers("spread", x, u=u, place_TC=items.place_TC, x=x)
    _spread[(items.place_TC.numel(), triton.cdiv(width, block))](
        *arguments, width, C=chosen, M=items.size, SOURCE=padded, PADDED=items.size if in_order else 0,
        BLOCK_D=block,
        num_warps=4, **dependent(x),
    )  # fmt: skip


@triton.jit
def _act_items(
    y_SN, scale_E2, bias_EN, squares_PT, item_J2, count_1, token_S, h, T, INNER, D, eps, slope, limit,
    BIAS: tl.constexpr, CLAMP: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr,
    M: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_n = n < INNER
    begin(PDL)
    if item < tl.load(count_1):
        expert, used = tl.load(item_J2 + item * 2), tl.load(item_J2 + item * 2 + 1)
        gate_scale, up_scale = tl.load(scale_E2 + expert * 2), tl.load(scale_E2 + expert * 2 + 1)
        if BIAS:
            of_expert = bias_EN + expert.to(tl.int64) * (2 * INNER) + n
            gate_bias = tl.load(of_expert, mask=in_n, other=0.0)
            up_bias = tl.load(of_expert + INNER, mask=in_n, other=0.0)
        for first in tl.static_range(0, M, BLOCK_M):
            if first < used:
                row = first + tl.arange(0, BLOCK_M)
                in_m = row < used
                place = item.to(tl.int64) * M + row
                token = tl.load(token_S + place, mask=in_m, other=0)
                rms = inverse_rms(squares_PT, token, in_m, T, D, eps, SQ_P, SQ_PADDED)
                inside = in_m[:, None] & in_n[None, :]
                at = y_SN + place[:, None] * (2 * INNER) + n[None, :]
                gate = tl.load(at, mask=inside, other=0.0).to(tl.float32) * gate_scale * rms[:, None]
                up = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32) * up_scale * rms[:, None]
                if BIAS:
                    gate += gate_bias[None, :]
                    up += up_bias[None, :]
                if CLAMP:
                    gate = tl.minimum(gate, limit)
                    up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
                out = (gate * tl.sigmoid(gate * slope) * up).to(h.dtype.element_ty)
                store_operand(h + item.to(tl.int64) * M * INNER, out, row, n, inside, INNER, PADDED)


def act_items(
    y_SN: torch.Tensor,
    scale_E2: torch.Tensor,
    squares_PT: torch.Tensor,
    items: Items,
    h: torch.Tensor,
    *,
    in_order: bool,
    width: int,
    eps: float,
    bias_EN: torch.Tensor | None = None,
    clamp: Clamp | None = None,
) -> None:
    """Write silu(gate) * up of all items, or the activation of `clamp`: the input of their down projections.

    Args:
        y_SN: Columns 0..I gate and I..2I up.
        scale_E2: fp32 factors of each expert's gate and up.
        squares_PT: Partial sums of squares, from which 1/rms is computed.
        items: As :func:`arrange` has written them.
        h: Written, [M, I] per item or in the order of ``packed_gemm`` for M tokens.
        in_order: Whether ``h`` is in the order of ``packed_gemm``.
        width: Hidden size, over which the mean square is taken.
        eps: Added to the mean square, as the RMSNorm does.
        bias_EN: fp32, added to gate and up of each expert.
        clamp: Activation between the products; None for SwiGLU.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    (squares, tokens), inner = squares_PT.shape, y_SN.shape[1] // 2
    block_m, block_i = min(16, items.size), 128
    arguments = pointers(
        "act_items", h, y_SN=y_SN, scale_E2=scale_E2, bias_EN=bias_EN, squares_PT=squares_PT,
        item_J2=items.item_J2, count_1=items.count_1, token_S=items.token_S, h=h,
    )  # fmt: skip
    slope, limit = clamp or (1.0, 0.0)
    _act_items[(triton.cdiv(inner, block_i), len(items.item_J2))](
        *arguments, tokens, inner, width, eps, slope, limit, BIAS=bias_EN is not None,
        CLAMP=clamp is not None, SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        M=items.size, PADDED=items.size if in_order else 0, BLOCK_M=block_m, BLOCK_I=block_i, num_warps=4,
        **dependent(h),
    )  # fmt: skip
