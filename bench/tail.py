"""What a rollout's tail costs, by which sizes of decode steps there are and when a smaller one is taken.

    python -m bench tail --out bench/results/tail.json

Needs no GPU: the engine's own scheduler runs through completions of drawn lengths (`bench.lengths`), round by
round, and each round counts the rows of the step that it would be decoded with. A row that is computed and
gives no token of a completion is wasted. Seconds are the rows of each step read off a line through measured
steps (a committed result of `bench rollout`), which says nothing of how products are padded between them.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.lengths import KINDS, draw_lengths
from bench.result import read_rows, write_result
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.limits import MAX_ROWS, ROW_COUNTS, rows_of_step
from qerl.rollout.paged.scheduler import Pace, Scheduler
from qerl.rollout.session import new_sequences

POWERS = tuple(count for count in ROW_COUNTS if count & (count - 1) == 0)

Choice = Callable[[int, int | None], int]
"""Rows of a step, from what runs and the rows of the step in use."""


def at_a_quarter(running: int, present: int | None) -> int:
    """Powers of two, and a smaller one once a quarter of the rows is enough: the rule before."""
    small = Pace().small_rows
    if present is not None and (present // 4 if present > small else 0) < running <= present:
        return present
    return next(count for count in POWERS if count >= running)


def at_once(running: int, present: int | None) -> int:
    """Powers of two, and a smaller one as soon as it is enough."""
    small = Pace().small_rows
    least = running if present is None else max(running, min(present, small))
    return next(count for count in POWERS if count >= least)


def as_the_engine(running: int, present: int | None) -> int:
    """What the engine does."""
    return rows_of_step(running, present, Pace().small_rows)


RULES: dict[str, Choice] = {
    "powers of two, at a quarter": at_a_quarter,
    "powers of two, at once": at_once,
    "all sizes, at once": as_the_engine,
}


def rounds(lengths: Sequence[int], group: int, rows: int, choose: Choice) -> list[int]:
    """Rows of the step of each round of a rollout.

    Args:
        lengths: Tokens of each completion.
        group: Completions of a prompt.
        rows: Completions that are decoded side by side at most.
        choose: Which step is taken.
    """
    pace = Pace()
    scheduler = Scheduler(BlockManager(len(lengths) * (max(lengths) // 64 + 8), 64), rows, pace)
    prompts = [[0] * 256] * (len(lengths) // group)
    added = new_sequences(prompts, [SamplingParams(length) for length in lengths])
    scheduler.add(added)
    wanted = dict(zip(added, lengths, strict=True))
    taken: list[int] = []
    while scheduler.busy:
        scheduler.next_round()
        taken.append(choose(len(scheduler.running), taken[-1] if taken else None))
        generated = {
            row: min(sequence.generated + pace.round_steps, wanted[sequence])
            for row, sequence in scheduler.running.items()
        }
        ended = {
            row: sequence for row, sequence in scheduler.running.items() if generated[row] == wanted[sequence]
        }
        scheduler.advance(generated, ended)
        for sequence in ended.values():
            scheduler.finish(sequence)
    return taken


def nvfp4_steps(name: str) -> dict[int, float]:
    """Milliseconds of our own steps of NVFP4 with an adapter, by rows, in ``results/NAME.json``."""
    return {
        row["batch"]: row["step_ms"]
        for row in read_rows(name)
        if row["engine"] == "qerl" and row["weights"] == "nvfp4" and row["lora_rank"]
    }


def milliseconds(rows: int, measured: dict[int, float]) -> float:
    """Time of a step of so many rows, on a line between the measured ones, or through the last two."""
    known = sorted(measured)
    above = next((i for i, count in enumerate(known) if count >= rows), len(known) - 1)
    low, high = known[max(0, above - 1)], known[max(1, above)]
    share = (rows - low) / (high - low)
    return measured[low] + share * (measured[high] - measured[low])


def simulate(
    spec: str, samples: int, most: int, group: int, measured: dict[int, float]
) -> list[dict[str, Any]]:
    """A row for each rule: tokens, row steps, the share of them that is wasted, and seconds of decoding."""
    lengths = draw_lengths(spec, samples, most)
    found = []
    for name, choose in RULES.items():
        taken = rounds(lengths, group, min(samples, MAX_ROWS), choose)
        steps = Pace().round_steps
        computed = steps * sum(taken)
        found.append(
            {
                "lengths": spec,
                "samples": samples,
                "most": most,
                "rule": name,
                "tokens": sum(lengths),
                "row_steps": computed,
                "wasted": 1 - sum(lengths) / computed,
                "decode_s": sum(steps * milliseconds(rows, measured) for rows in taken) / 1e3,
                "sizes": sorted(set(taken), reverse=True),
            }
        )
    return found


def main(arguments: list[str]) -> None:
    """Runs `python -m bench tail` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench tail", description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", nargs="+", default=["lognormal:400", "uniform", "equal"], help=KINDS)
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--most", type=int, default=1024, help="tokens of the longest")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument(
        "--steps", default="rollout-7b-h100", help="result whose nvfp4 rows say what steps take"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    measured = nvfp4_steps(args.steps)
    rows: list[dict[str, Any]] = []
    for spec in args.lengths:
        for samples in args.samples:
            for row in simulate(spec, samples, args.most, args.group, measured):
                rows.append(row)
                print(
                    f"{spec} x {samples}, {row['rule']}: {row['wasted']:.1%} of {row['row_steps']} row steps "
                    f"wasted, {row['decode_s']:.2f} s of decoding"
                )
    if args.out:
        write_result(args.out, " ".join(["tail", *arguments]), rows, steps_of=args.steps)
