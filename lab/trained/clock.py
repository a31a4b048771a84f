"""Estimate the step times of a run for a 7B model; times of a 135M model on a shared GPU are no measure.

The rows that decode in each round follow from the lengths of the run's samples, as the engine's scheduler
would fill rows (`bench.tail.refilled`). First each token counts as `TOKENS`, so that completions are about as
long as those of the measured step, in rounds of the engine's decode steps. The time of a round is
interpolated linearly between measured decode steps, the time of the update is proportional to tokens, and the
rest of the measured rollout (prefill, start) is the same in every step. Given up: the cost of longer keys,
and prompts of another length.
"""

from collections.abc import Sequence
from functools import cache

from bench.lengths import draw_lengths
from bench.result import read_rows
from bench.tail import as_the_engine, milliseconds, nvfp4_steps, refilled, rounds
from qerl.rollout.paged.scheduler import Pace

TOKENS = 10
"""Tokens of the 7B model per token of the small one: at most 96 become 960, beside 1024 of the measured
step."""

DECODE, STEP = "rollout-7b-h200", "step-7b-lognormal-h200"
"""Results with the measured times of decode steps and of a whole step."""


def step_seconds(lengths: Sequence[Sequence[int]], group: int, max_staleness: int) -> list[float]:
    """Seconds of each optimizer step of a run.

    Args:
        lengths: Tokens of the samples that each step trained on, the samples of a group side by side.
        group: Samples per prompt.
        max_staleness: Optimizer steps that a group may start early.
    """
    long = [[TOKENS * tokens for tokens in step] for step in lengths]
    flat = [tokens for step in long for tokens in step]
    taken = refilled(flat, group, len(lengths[0]) // group, max_staleness)
    per_token, rest = _update_and_rest()
    return [
        _decode_seconds(rows) + per_token * sum(step) + rest
        for (rows, _), step in zip(taken, long, strict=True)
    ]


def _decode_seconds(rows: Sequence[int]) -> float:
    """Seconds of decode rounds with these numbers of rows."""
    measured = nvfp4_steps(DECODE)
    return sum(Pace().round_steps * milliseconds(count, measured) for count in rows) / 1e3


@cache
def _update_and_rest() -> tuple[float, float]:
    """Seconds of the update per token, and of the rollout besides decoding, in the measured step."""
    (row,) = read_rows(STEP)
    samples = row["prompts"] * row["samples"]
    lengths = draw_lengths(row["lengths"], samples, row["completion_tokens"])
    taken = rounds(lengths, row["samples"], samples, as_the_engine)
    return row["update_s"] / row["tokens"], row["rollout_s"] - _decode_seconds(taken)
