"""top-k, top-p and min-p without a sort: turn logits into log-probabilities and mask the tokens left out.

Each filter keeps all tokens above some probability, so finding that threshold is enough: for top-k, the
count of tokens above it reaches k; for top-p, their mass reaches p of the mass that top-k keeps. Distances
from the largest logit are compared by their bits, whose order as integers is that of the numbers: a search
among 2^31 candidates, several of which each pass over the row tests at once. One program has a row, whose
logits stay in the L2 cache. A sort of a row of 152,000 makes several passes over keys and indices and needs
memory for both.

Every row has its own settings. The program of a row without filters returns at once, so one captured step
serves all settings, and where no row has a filter the launch takes almost no time.

Sums are FP32, in a fixed order. Tokens that have exactly the same logit as the last one kept are kept with
it, where a sort would choose among them.

Shapes: T rows, each with one token of the step, V vocabulary, P partial sums of squares, K stop tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import begin
from qerl.kernels.launch import dependent, pointers
from qerl.kernels.limits import STOP_TOKENS

GREEDY, FREE, FILTERED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How a row draws: the most probable token, any token, or one of those that filters keep."""

NEVER = -1e30
"""Log-probability of a token that a filter left out; -inf times a probability of zero would be NaN."""

BLOCK_V = 4096
"""Logits of a row that a program reads at once."""

_WARPS = 16
_WAYS = 8
_LARGEST = 0x7F7FFFFF  # bits of the largest finite number


def _passes(numbers: int) -> int:
    """Return the passes after which one of this many numbers is left, if each keeps one part of `_WAYS`."""
    count = 0
    while numbers > 1:
        numbers, count = -(-numbers // _WAYS), count + 1
    return count


_PASSES = _passes(_LARGEST + 1)


@dataclass
class RowSettings:
    """Sampling settings and stop tokens of each row. The host writes a row when a sequence enters it.

    Attributes:
        mode_T: int32, `GREEDY`, `FREE` or `FILTERED`.
        inverse_temperature_T: fp32, 1 where a row is greedy.
        top_k_T: int32, tokens kept; 0 for all.
        top_p_T: fp32, probability mass that the kept tokens reach; 1 for all.
        farthest_T: fp32, maximum distance between the log-probability of a kept token and the largest one;
            infinite for all.
        stop_TK: int32, tokens that end a row; -1 is none.
    """

    mode_T: torch.Tensor
    inverse_temperature_T: torch.Tensor
    top_k_T: torch.Tensor
    top_p_T: torch.Tensor
    farthest_T: torch.Tensor
    stop_TK: torch.Tensor

    @classmethod
    def free(cls, rows: int, device: torch.device | str) -> "RowSettings":
        """Return settings of rows that draw any token at temperature 1 and have no stop tokens."""

        def integers(value: int, *shape: int) -> torch.Tensor:
            return torch.full((rows, *shape), value, dtype=torch.int32, device=device)

        def numbers(value: float) -> torch.Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        return cls(
            integers(FREE.value), numbers(1.0), integers(0), numbers(1.0), numbers(torch.inf),
            integers(-1, STOP_TOKENS),
        )  # fmt: skip


@triton.jit
def narrowest(
    row, V, scale, best, high, wanted,
    COUNT: tl.constexpr, PASSES: tl.constexpr, WAYS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Bits of the least distance within which tokens, counted or weighed, reach what is wanted; `high` if
    none less does."""
    low = tl.full((), -1, tl.int32)  # of what lies within it, it is known that it is too little
    way, offset = tl.arange(0, WAYS), tl.arange(0, BLOCK_V)
    for _ in range(PASSES):
        step = (high - low - 1) // WAYS + 1
        asked = low + tl.minimum((way + 1) * step, high - low)
        masses = tl.zeros((BLOCK_V, WAYS), tl.float32)
        for first in range(0, V, BLOCK_V):
            v = first + offset
            distance = best - tl.load(row + v, mask=v < V, other=-float("inf")) * scale
            weight = tl.where(v < V, 1.0 if COUNT else tl.exp(-distance), 0.0)
            within = distance.to(tl.int32, bitcast=True)[:, None] <= asked[None, :]
            masses += tl.where(within, weight[:, None], 0.0)
        small = tl.sum((tl.sum(masses, axis=0) < wanted).to(tl.int32), axis=0)
        small = tl.minimum(small, WAYS - 1)
        end = low + tl.minimum((small + 1) * step, high - low)
        low += tl.minimum(small * step, high - low - 1)
        high = end
    return high


@triton.jit
def _filter(
    logits_TV, squares_PT, entropy_T, done_T, mode_T, inverse_temperature_T, top_k_T, top_p_T, farthest_T,
    T, V, D, eps, never, largest,
    PASSES: tl.constexpr, WAYS: tl.constexpr,
    SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    begin(PDL)
    if (tl.load(mode_T + t) != FILTERED) | (tl.load(done_T + t) != 0):
        return
    p = tl.arange(0, SQ_PADDED)
    rms = 1.0 / tl.sqrt(tl.sum(tl.load(squares_PT + p * T + t, mask=p < SQ_P, other=0.0)) / D + eps)
    scale = rms * tl.load(inverse_temperature_T + t)
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

    high, mass = tl.full((), 0, tl.int32) + largest, total
    top_k, top_p = tl.load(top_k_T + t), tl.load(top_p_T + t)
    if top_k > 0:
        high = narrowest(row, V, scale, best, high, top_k.to(tl.float32), True, PASSES, WAYS, BLOCK_V)
        weights = tl.zeros((BLOCK_V,), tl.float32)
        for first in range(0, V, BLOCK_V):
            v = first + offset
            distance = best - tl.load(row + v, mask=v < V, other=-float("inf")) * scale
            kept = (v < V) & (distance.to(tl.int32, bitcast=True) <= high)
            weights += tl.where(kept, tl.exp(-distance), 0.0)
        mass = tl.sum(weights, axis=0)
    if top_p < 1:
        high = narrowest(row, V, scale, best, high, top_p * mass, False, PASSES, WAYS, BLOCK_V)
    farthest = tl.load(farthest_T + t)
    for first in range(0, V, BLOCK_V):
        v = first + offset
        distance = best - tl.load(row + v, mask=v < V, other=-float("inf")) * scale
        kept = (distance.to(tl.int32, bitcast=True) <= high) & (distance <= farthest)
        tl.store(row + v, tl.where(kept, -distance - log_total, never), mask=v < V)


def apply_filters(
    logits_TV: torch.Tensor,
    squares_PT: torch.Tensor,
    done_T: torch.Tensor,
    settings: RowSettings,
    *,
    width: int,
    eps: float,
) -> torch.Tensor:
    """Turn logits into log-probabilities in place, with `NEVER` for the tokens that filters leave out.

    Rows without filters and rows that have ended are not touched.

    Args:
        logits_TV: fp32, before the final norm's 1/rms; a row with a logit that is not finite gets an entropy
            that is not finite.
        squares_PT: Partial sums of squares of the final norm's input.
        done_T: int32, 0 where a token is to be drawn.
        settings: Settings of the rows.
        width: Hidden size of the final norm.
        eps: Added to the mean square, as the final norm does.

    Returns:
        fp32 [T], entropies in nats before any token is left out; undefined in other rows.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, vocabulary = logits_TV.shape
    entropy_T = torch.empty(tokens, device=logits_TV.device)
    squares = squares_PT.shape[0]
    arguments = pointers(
        "apply_filters", entropy_T, logits_TV=logits_TV, squares_PT=squares_PT, entropy_T=entropy_T,
        done_T=done_T, mode_T=settings.mode_T, inverse_temperature_T=settings.inverse_temperature_T,
        top_k_T=settings.top_k_T, top_p_T=settings.top_p_T, farthest_T=settings.farthest_T,
    )  # fmt: skip
    _filter[(tokens,)](
        *arguments, tokens, vocabulary, width, eps, NEVER, _LARGEST,
        PASSES=_PASSES, WAYS=_WAYS, SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        BLOCK_V=BLOCK_V, num_warps=_WARPS,
        enable_fp_fusion=False,  # a distance must have the same bits in every pass
        **dependent(logits_TV),
    )  # fmt: skip
    return entropy_T
