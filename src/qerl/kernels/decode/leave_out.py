"""top-p and min-p without a sort: logits become log-probabilities, of which some are left out.

top-p keeps the most probable tokens whose mass reaches p. That set is all tokens down to some probability, so
it is enough to find that one number, and the mass above a number is a sum over the row. Numbers are compared
by their bits, which for distances from the largest logit are in the order of the numbers: a search among 2^31
candidates, of which each pass over the row asks several at once. One program has a row, whose logits stay in
the L2 cache. A sort of a row of 152,000 makes several passes over keys and indices and wants memory for both.

Sums are taken in a fixed order, in FP32. Tokens that have exactly the same logit as the last one kept are
kept with it, where a sort would choose among them.

Shapes: T rows, V vocabulary, P partial sums of squares.
"""

import math

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import begin
from qerl.kernels.launch import dependent, pointers

NEVER = -1e30
"""Log-probability of a token that a filter left out; -inf times a probability of zero would be NaN."""

BLOCK_V = 4096
"""Logits of a row that are looked at at once."""

_WARPS = 16
_WAYS = 8
_LARGEST = 0x7F7FFFFF  # bits of the largest finite number


def _passes(numbers: int) -> int:
    """Passes after which one of so many numbers is left, if each leaves one part of `_WAYS`."""
    count = 0
    while numbers > 1:
        numbers, count = -(-numbers // _WAYS), count + 1
    return count


_PASSES = _passes(_LARGEST + 1)


@triton.jit
def _leave_out(
    logits_TV, squares_PT, entropy_T, T, V, D, eps, inverse_temperature, top_p, farthest, never, largest,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, PASSES: tl.constexpr, WAYS: tl.constexpr,
    SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    begin(PDL)
    p = tl.arange(0, SQ_PADDED)
    rms = 1.0 / tl.sqrt(tl.sum(tl.load(squares_PT + p * T + t, mask=p < SQ_P, other=0.0)) / D + eps)
    scale = rms * inverse_temperature
    row = logits_TV + t.to(tl.int64) * V
    offset = tl.arange(0, BLOCK_V)
    bests = tl.full((BLOCK_V,), -float("inf"), tl.float32)
    for first in range(0, V, BLOCK_V):
        v = first + offset
        bests = tl.maximum(bests, tl.load(row + v, mask=v < V, other=-float("inf")) * scale)
    best = tl.max(bests, axis=0)
    weights, around = tl.zeros((BLOCK_V,), tl.float32), tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, V, BLOCK_V):
        v = first + offset
        x = tl.load(row + v, mask=v < V, other=0.0) * scale
        weight = tl.where(v < V, tl.exp(x - best), 0.0)
        weights += weight
        around += tl.where(v < V, weight * (x - best), 0.0)
    total = tl.sum(weights, axis=0)
    log_total = tl.log(total)
    tl.store(entropy_T + t, log_total - tl.sum(around, axis=0) / total)

    # Bits of distances: of the mass up to `low` it is known that it is too small, up to `high` it is not.
    low, high = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32) + largest
    if TOP_P:
        way = tl.arange(0, WAYS)
        for _ in range(PASSES):
            step = (high - low - 1) // WAYS + 1
            asked = low + tl.minimum((way + 1) * step, high - low)
            masses = tl.zeros((BLOCK_V, WAYS), tl.float32)
            for first in range(0, V, BLOCK_V):
                v = first + offset
                distance = best - tl.load(row + v, mask=v < V, other=-float("inf")) * scale
                weight = tl.where(v < V, tl.exp(-distance), 0.0)
                within = distance.to(tl.int32, bitcast=True)[:, None] <= asked[None, :]
                masses += tl.where(within, weight[:, None], 0.0)
            small = tl.sum((tl.sum(masses, axis=0) < top_p * total).to(tl.int32), axis=0)
            small = tl.minimum(small, WAYS - 1)
            end = low + tl.minimum((small + 1) * step, high - low)
            low += tl.minimum(small * step, high - low - 1)
            high = end
    for first in range(0, V, BLOCK_V):
        v = first + offset
        distance = best - tl.load(row + v, mask=v < V, other=-float("inf")) * scale
        kept = distance.to(tl.int32, bitcast=True) <= high
        if MIN_P:
            kept = kept & (distance <= farthest)
        tl.store(row + v, tl.where(kept, -distance - log_total, never), mask=v < V)


def leave_out(
    logits_TV: torch.Tensor,
    squares_PT: torch.Tensor,
    *,
    width: int,
    eps: float,
    temperature: float,
    top_p: float,
    min_p: float,
) -> torch.Tensor:
    """Turn logits into log-probabilities in place, those of tokens that are left out into `NEVER`.

    Args:
        logits_TV: fp32, before the final norm's 1/rms; a row with one that is not finite gets an entropy
            that is not.
        squares_PT: Partial sums of squares of the final norm's input.
        width: Hidden size of the final norm.
        eps: Added to the mean square, as the final norm does.
        temperature: Divides the logits; above 0.
        top_p: Mass that the tokens kept reach; 1 keeps all.
        min_p: Probability of a token that is kept, as a share of the largest; 0 keeps all.

    Returns:
        fp32 [T], entropies in nats before anything is left out.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, vocabulary = logits_TV.shape
    entropy_T = torch.empty(tokens, device=logits_TV.device)
    squares = squares_PT.shape[0]
    arguments = pointers(
        "leave_out", entropy_T, logits_TV=logits_TV, squares_PT=squares_PT, entropy_T=entropy_T
    )
    _leave_out[(tokens,)](
        *arguments, tokens, vocabulary, width, eps, 1.0 / temperature, top_p,
        -math.log(min_p) if min_p else 0.0, NEVER, _LARGEST,
        TOP_P=top_p < 1, MIN_P=min_p > 0, PASSES=_PASSES, WAYS=_WAYS,
        SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares), BLOCK_V=BLOCK_V, num_warps=_WARPS,
        enable_fp_fusion=False,  # a distance must have the same bits in every pass
        **dependent(logits_TV),
    )  # fmt: skip
    return entropy_T
