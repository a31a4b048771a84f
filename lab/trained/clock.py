"""What the steps of a run would take a 7B model: one of 135M on a card that other runs share has no clock.

Which rows decode in which round follows from the lengths that the run's samples had, as the engine's
scheduler would fill them (`bench.tail.refilled`). Each token stands for `TOKENS` first, so that completions
are about as long as those of the step that was measured, in rounds of the engine's steps. Seconds of a round
lie on a line through measured decode steps, those of the update are by token, and what is left of the
measured rollout (prefill, start) is the same in every step. Given up: what longer keys cost, and prompts of
another length.
"""

from collections.abc import Sequence
from functools import cache

from bench.lengths import draw_lengths
from bench.result import read_rows
from bench.tail import as_the_engine, milliseconds, nvfp4_steps, refilled, rounds
from qerl.rollout.paged.scheduler import Pace

TOKENS = 10
"""Of the 7B model, for each of the small one's: 96 at most become 960, beside 1024 of the measured step."""

DECODE, STEP = "rollout-7b-h200", "step-7b-lognormal-h200"
"""Results that say what decode steps and a whole step took."""


def step_seconds(lengths: Sequence[Sequence[int]], group: int, max_staleness: int) -> list[float]:
    """Seconds of each optimizer step of a run.

    Args:
        lengths: Tokens of the samples that each step trained on, the samples of a group side by side.
        group: Samples of a prompt.
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
    """Of rounds whose decode steps have so many rows."""
    measured = nvfp4_steps(DECODE)
    return sum(Pace().round_steps * milliseconds(count, measured) for count in rows) / 1e3


@cache
def _update_and_rest() -> tuple[float, float]:
    """Seconds of the update for each token, and of the rollout beside decoding, of the measured step."""
    (row,) = read_rows(STEP)
    samples = row["prompts"] * row["samples"]
    lengths = draw_lengths(row["lengths"], samples, row["completion_tokens"])
    taken = rounds(lengths, row["samples"], samples, as_the_engine)
    return row["update_s"] / row["tokens"], row["rollout_s"] - _decode_seconds(taken)
