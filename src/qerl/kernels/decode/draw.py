"""Draw a token for each sequence, and advance its row's state, so that the next step needs no host.

The token is found by inverting the cumulative distribution at one uniform number, as qerl.rollout.engine
does, so a sequence's draw depends only on its own stream. First every block of the vocabulary writes its
largest logit, its sum of exponentials and its share of the entropy; then one program per sequence finds the
block in which the cumulative sum passes the uniform number, and the token within that block. Both searches
use FP64: an FP32 sum is off by 1e-7 of the whole, and would draw a token of almost no weight once in some ten
million times. Blocks and tokens of zero weight are skipped, never counted.

A finished sequence keeps its row and stops writing; the host notices it a few steps later.

Temperature, filters and stop tokens are read per row (`RowSettings`), so one captured step serves them all.
For rows with filters, `apply_filters` has turned the logits into log-probabilities before.

Shapes: T rows, each with one token of the step, V vocabulary, K stop tokens, M tokens that a row may
generate, P partial sums of squares.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import begin
from qerl.kernels.decode.filters import FILTERED, GREEDY, RowSettings, apply_filters
from qerl.kernels.launch import dependent, pointers
from qerl.kernels.limits import STOP_TOKENS

BLOCK_V = 4096
"""Logits that one program of the first kernel takes."""


@dataclass
class RowState:
    """State that the kernel reads and advances; each row of the batch is a slot for one sequence.

    Attributes:
        token_T: int32, the token whose logits are drawn from next.
        position_T: int32, its position.
        limit_2T: int32, cached tokens that it sees: of the shared prompt, and of the sequence itself, the
            last of them being the token; 0 of the sequence once it has ended.
        generated_T: int32, tokens generated so far.
        max_new_T: int32, maximum tokens to generate.
        done_T: int32, 0 while the sequence runs, else why it ended: 1 stop token, 2 length, 3 logits that are
            not finite.
        uniform_TM: fp32 in [0, 1), one for each token that may be generated.
        out_token_TM: int32, tokens generated.
        out_stats_2TM: fp32, their log-probabilities and entropies.
    """

    token_T: torch.Tensor
    position_T: torch.Tensor
    limit_2T: torch.Tensor
    generated_T: torch.Tensor
    max_new_T: torch.Tensor
    done_T: torch.Tensor
    uniform_TM: torch.Tensor
    out_token_TM: torch.Tensor
    out_stats_2TM: torch.Tensor


_BELOW_ONE = 1 - 2**-24  # the largest FP32 number below 1; FP64 between the two would be rounded to 1


def uniforms_of_rows(uniforms: torch.Tensor) -> torch.Tensor:
    """Round FP64 uniform numbers in [0, 1) to FP32 for `RowState.uniform_TM`, keeping them below 1. At 1 the
    last token of nonzero weight would be drawn, however small its weight."""
    return uniforms.float().clamp_(max=_BELOW_ONE)


@triton.jit
def row_inverse_rms(squares_PT, t, T, D, eps, P: tl.constexpr, P_PADDED: tl.constexpr):
    """1 / rms of one token from its partial sums of squares."""
    p = tl.arange(0, P_PADDED)
    return 1.0 / tl.sqrt(tl.sum(tl.load(squares_PT + p * T + t, mask=p < P, other=0.0)) / D + eps)


@triton.jit
def row_factor(
    squares_PT, mode_T, inverse_temperature_T, t, T, D, eps, P: tl.constexpr, P_PADDED: tl.constexpr
):  # fmt: skip
    """What the logits of a row are multiplied by: 1/rms through its temperature, or 1 where they are
    log-probabilities at temperature already."""
    factor = row_inverse_rms(squares_PT, t, T, D, eps, P, P_PADDED) * tl.load(inverse_temperature_T + t)
    return tl.where(tl.load(mode_T + t) == FILTERED, 1.0, factor)


@triton.jit
def scaled_logits(logits_TV, t, v, V, factor):
    """Logits of one token times a factor, fp32, and -inf beyond the vocabulary."""
    x = tl.load(logits_TV + t.to(tl.int64) * V + v, mask=v < V, other=-float("inf")).to(tl.float32)
    return x * factor


@triton.jit
def first_past(share, weights, at):
    """The first place by which the cumulative weight exceeds a share of the whole, and how far into that
    place's own weight the share reaches. Rounding may leave no such place, then it is the last that weighs
    anything."""
    scan = tl.cumsum(weights.to(tl.float64), axis=0)
    target = share * tl.max(scan, axis=0)
    last = tl.max(tl.where(weights > 0, at, 0), axis=0)
    place = tl.min(tl.where((scan > target) & (weights > 0), at, last), axis=0)
    before = tl.max(tl.where(at < place, scan, 0.0), axis=0)
    own = tl.sum(tl.where(at == place, weights, 0.0), axis=0)
    return place, tl.maximum(target - before, 0.0) / own


@triton.jit
def entropy_of(shares, in_b, bests, best, fade, sums, total):
    """The entropy of a token's distribution.

    It follows from the sum of weight * (x - best of all), made of the sums that were taken around each
    block's own best.
    """
    around = tl.load(shares, mask=in_b, other=0.0) * fade
    around += tl.where(in_b & (sums > 0), sums * (bests - best), 0.0)
    return tl.log(total) - tl.sum(around, axis=0) / total


@triton.jit
def ending(token, n, finite, max_new_t, stop_K, K: tl.constexpr):
    """What a row's `RowState.done_T` is behind its n-th token."""
    stop = tl.sum((tl.load(stop_K + tl.arange(0, K)) == token).to(tl.int32), axis=0) > 0
    return tl.where(finite, tl.where(stop, 1, tl.where(n >= tl.load(max_new_t), 2, 0)), 3)


@triton.jit
def _partial_softmax(
    logits_TV, squares_PT, stats_3TB, mode_T, inverse_temperature_T, T, V, D, eps, blocks,
    SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t, block = tl.program_id(0), tl.program_id(1)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    begin(PDL)
    factor = row_factor(squares_PT, mode_T, inverse_temperature_T, t, T, D, eps, SQ_P, SQ_PADDED)
    x = scaled_logits(logits_TV, t, v, V, factor)
    best = tl.max(x, axis=0)
    weight = tl.exp(x - best)
    at = stats_3TB + t * blocks + block
    tl.store(at, best)
    tl.store(at + T * blocks, tl.sum(weight, axis=0))
    tl.store(at + 2 * T * blocks, tl.sum(tl.where(v < V, weight * (x - best), 0.0), axis=0))


@triton.jit
def _choose(
    logits_TV, squares_PT, entropy_T, stats_3TB, mode_T, inverse_temperature_T, stop_TK, uniform_TM,
    token_T, position_T, limit_2T, generated_T, max_new_T, done_T, out_token_TM, out_stats_2TM,
    T, V, D, eps, blocks, M,
    STOPS: tl.constexpr, BLOCKS_PADDED: tl.constexpr,
    SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    begin(PDL)
    if tl.load(done_T + t) != 0:
        return
    mode = tl.load(mode_T + t)
    filtered = mode == FILTERED
    factor = row_factor(squares_PT, mode_T, inverse_temperature_T, t, T, D, eps, SQ_P, SQ_PADDED)
    b = tl.arange(0, BLOCKS_PADDED)
    in_b = b < blocks
    at = stats_3TB + t * blocks + b
    bests = tl.load(at, mask=in_b, other=-float("inf"))
    best = tl.max(bests, axis=0)
    fade = tl.where(in_b, tl.exp(bests - best), 0.0)
    sums = tl.load(at + T * blocks, mask=in_b, other=0.0) * fade
    total = tl.sum(sums, axis=0)
    entropy = entropy_of(at + 2 * T * blocks, in_b, bests, best, fade, sums, total)
    # Where filters left tokens out, the distribution is the one before them.
    entropy = tl.where(filtered, tl.load(entropy_T + t, mask=filtered, other=0.0), entropy)
    finite = (entropy == entropy) & (tl.abs(entropy) < float("inf"))

    n = tl.load(generated_T + t)
    offset = tl.arange(0, BLOCK_V)
    block, share = first_past(tl.load(uniform_TM + t * M + n).to(tl.float64), sums, b)
    if mode == GREEDY:
        block = tl.argmax(bests, axis=0)
    v = block * BLOCK_V + offset
    x = scaled_logits(logits_TV, t, v, V, factor)
    inner, _ = first_past(share, tl.exp(x - best), offset)
    if mode == GREEDY:
        inner = tl.argmax(x, axis=0)
    chosen = tl.max(tl.where(offset == inner, x, -float("inf")), axis=0)
    token = (block * BLOCK_V + inner).to(tl.int32)
    logprob = tl.where(filtered, chosen, chosen - best - tl.log(total))

    if finite:
        tl.store(out_token_TM + t * M + n, token)
        tl.store(out_stats_2TM + t * M + n, logprob)
        tl.store(out_stats_2TM + (T + t) * M + n, entropy)
        n += 1
        tl.store(generated_T + t, n)
    ended = ending(token, n, finite, max_new_T + t, stop_TK + t * STOPS, STOPS)
    tl.store(done_T + t, ended)
    if ended != 0:
        tl.store(limit_2T + T + t, 0)
        return
    own = tl.load(limit_2T + T + t)
    tl.store(token_T + t, token)
    tl.store(position_T + t, tl.load(position_T + t) + 1)
    tl.store(limit_2T + T + t, own + 1)


@triton.jit
def _cap_logits(
    logits_TV, squares_PT, T, V, D, eps, cap,
    SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    begin(PDL)
    factor = row_inverse_rms(squares_PT, t, T, D, eps, SQ_P, SQ_PADDED)
    x = scaled_logits(logits_TV, t, v, V, factor) / cap
    tl.store(logits_TV + t.to(tl.int64) * V + v, cap * (2.0 * tl.sigmoid(2.0 * x) - 1.0), mask=v < V)


def cap_logits(
    logits_TV: torch.Tensor, squares_PT: torch.Tensor, *, cap: float, width: int, eps: float
) -> None:
    """Replace logits before the final norm's 1/rms by ``cap tanh(logits / cap)`` after it.

    Args:
        logits_TV: fp32, overwritten.
        squares_PT, width, eps: As for `draw_token`.
        cap: Bound of the logits.
    """
    tokens, vocabulary = logits_TV.shape
    squares = squares_PT.shape[0]
    _cap_logits[(tokens, triton.cdiv(vocabulary, BLOCK_V))](
        logits_TV, squares_PT, tokens, vocabulary, width, eps, cap,
        SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares), BLOCK_V=BLOCK_V, **dependent(logits_TV),
    )  # fmt: skip


def draw_token(
    logits_TV: torch.Tensor,
    squares_PT: torch.Tensor,
    stats_3TB: torch.Tensor,
    rows: RowState,
    settings: RowSettings,
    *,
    width: int,
    eps: float,
) -> None:
    """Draw a token for each sequence that has not ended, and prepare its next step.

    The token's log-probability and the entropy are those of the distribution at the row's temperature, before
    its filters; for a greedy row, at temperature 1.

    Args:
        logits_TV: fp32 or bf16 logits before the final norm's 1/rms; overwritten in rows with filters, for
            which they must be fp32.
        squares_PT: Partial sums of squares of the final norm's input.
        stats_3TB: fp32 scratch [3, T, ceil(V / `BLOCK_V`)].
        rows: State of the sequences, advanced by one token.
        settings: Settings of the rows.
        width: Hidden size of the final norm.
        eps: Added to the mean square, as the final norm does.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, vocabulary = logits_TV.shape
    blocks = stats_3TB.shape[2]
    squares = squares_PT.shape[0]
    shared = {
        "SQ_P": squares, "SQ_PADDED": triton.next_power_of_2(squares), "BLOCK_V": BLOCK_V, "num_warps": 8,
        **dependent(logits_TV),
    }  # fmt: skip
    entropy_T = apply_filters(logits_TV, squares_PT, rows.done_T, settings, width=width, eps=eps)
    arguments = pointers(
        "draw_token", stats_3TB, logits_TV=logits_TV, squares_PT=squares_PT, entropy_T=entropy_T,
        stats_3TB=stats_3TB, mode_T=settings.mode_T, inverse_temperature_T=settings.inverse_temperature_T,
        stop_TK=settings.stop_TK, uniform_TM=rows.uniform_TM, token_T=rows.token_T,
        position_T=rows.position_T, limit_2T=rows.limit_2T,
        generated_T=rows.generated_T, max_new_T=rows.max_new_T,
        done_T=rows.done_T, out_token_TM=rows.out_token_TM, out_stats_2TM=rows.out_stats_2TM,
    )  # fmt: skip
    _partial_softmax[(tokens, blocks)](
        logits_TV, squares_PT, stats_3TB, settings.mode_T, settings.inverse_temperature_T,
        tokens, vocabulary, width, eps, blocks, **shared,
    )  # fmt: skip
    _choose[(tokens,)](
        *arguments, tokens, vocabulary, width, eps, blocks, rows.uniform_TM.shape[1],
        STOPS=STOP_TOKENS, BLOCKS_PADDED=triton.next_power_of_2(blocks), **shared,
    )  # fmt: skip
