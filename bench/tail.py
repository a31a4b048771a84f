"""Simulated cost of a rollout's tail, by available decode-step sizes and the rule that picks a smaller one.

    python -m bench tail --out bench/results/tail.json

Needs no GPU: the engine's own scheduler runs completions of drawn lengths (`bench.lengths`) round by round,
and each round counts the rows of the decode step it would use. A row that is computed but yields no token of
a completion is wasted. Seconds are interpolated linearly, by rows, between measured steps (a committed result
of `bench rollout`); how products are padded between the measured sizes is not modeled.

    python -m bench tail --dead 0.5 --steps rollout-7b-h200 --samples 128

With `--dead` groups have no signal with this probability, and the rollout is DAPO's: groups enter an open
call by the trainer's rule (`qerl.trainer.dynamic_sampling`). It is compared with starting a group only once
another has failed, with rows that are always full, and with further rollouts for the missing groups. Figures
are means over 30 draws.

    python -m bench tail --max_staleness 0 1 2 4 --steps rollout-7b-h200 --samples 128

With `--max_staleness` rows are refilled across steps as in `qerl.trainer.refill`: seconds of decoding per
step, and the age in optimizer steps of its tokens when they train. Figures are means over the steps of a long
run after its first ones.
"""

import argparse
import random
import statistics
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
from qerl.trainer.dynamic_sampling import Intake
from qerl.trainer.refill import StalenessWindow

POWERS = tuple(count for count in ROW_COUNTS if count & (count - 1) == 0)

Choice = Callable[[int, int | None], int]
"""Rows of the next step, from the number of running sequences and the rows of the last step, if any."""


def at_a_quarter(running: int, present: int | None) -> int:
    """Return a power of two that shrinks once a quarter of the rows suffices: the engine's earlier rule."""
    small = Pace().small_rows
    if present is not None and (present // 4 if present > small else 0) < running <= present:
        return present
    return next(count for count in POWERS if count >= running)


def at_once(running: int, present: int | None) -> int:
    """Return a power of two that shrinks as soon as a smaller one suffices."""
    small = Pace().small_rows
    least = running if present is None else max(running, min(present, small))
    return next(count for count in POWERS if count >= least)


def as_the_engine(running: int, present: int | None) -> int:
    """Return the engine's own choice."""
    return rows_of_step(running, present, Pace().small_rows)


RULES: dict[str, Choice] = {
    "powers of two, at a quarter": at_a_quarter,
    "powers of two, at once": at_once,
    "all sizes, at once": as_the_engine,
}


def rounds(lengths: Sequence[int], group: int, rows: int, choose: Choice) -> list[int]:
    """Return the rows of the decode step of each round of a rollout.

    Args:
        lengths: Tokens of each completion.
        group: Completions per prompt.
        rows: Maximum number of completions decoded at a time.
        choose: The rule that picks the step.
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
    """Return milliseconds of QeRL's NVFP4 steps with an adapter, by rows, from ``results/NAME.json``."""
    return {
        row["batch"]: row["step_ms"]
        for row in read_rows(name)
        if row["engine"] == "qerl" and row["weights"] == "nvfp4" and row["lora_rank"]
    }


def milliseconds(rows: int, measured: dict[int, float]) -> float:
    """Return the time of a step of ``rows`` rows, linear between measured ones or through the last two."""
    known = sorted(measured)
    above = next((i for i, count in enumerate(known) if count >= rows), len(known) - 1)
    low, high = known[max(0, above - 1)], known[max(1, above)]
    share = (rows - low) / (high - low)
    return measured[low] + share * (measured[high] - measured[low])


def simulate(
    spec: str, samples: int, most: int, group: int, measured: dict[int, float]
) -> list[dict[str, Any]]:
    """Return a result row per rule: tokens, row steps, their wasted share, and seconds of decoding."""
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


class FirstStep(Intake):
    """The trainer's rule without a share from an earlier step."""

    def __init__(self, wanted: int, most: int, share: float) -> None:
        super().__init__(wanted, most)


class AfterFailures(Intake):
    """Rule that starts a group only once another has failed."""

    def start(self, room: int) -> range:
        """See `Intake.start`."""
        missing = self.wanted - sum(self._alive.values()) - (self.started - len(self._alive))
        begin = self.started
        self.started = min(begin + max(0, min(room, missing)), self._most)
        return range(begin, self.started)


class FullRows(Intake):
    """Rule that starts a group whenever there is room."""

    def start(self, room: int) -> range:
        """See `Intake.start`."""
        begin = self.started
        self.started = min(begin + max(0, room), self._most)
        return range(begin, self.started)


class Rounds(AfterFailures):
    """Rule that starts missing groups once all running ones have ended."""

    def start(self, room: int) -> range:
        """See `Intake.start`."""
        return super().start(room) if self.started == len(self._alive) else range(0)


INTAKES: dict[str, type[Intake]] = {
    "open call": Intake,
    "open call of a first step": FirstStep,
    "one for each failure": AfterFailures,
    "rows always full": FullRows,
    "further rollouts": Rounds,
}


def filled(
    kind: type[Intake],
    lengths: Sequence[int],
    alive: Sequence[bool],
    group: int,
    wanted: int,
    share: float,
) -> tuple[list[int], Intake]:
    """Return the rows of each round's decode step in a rollout with dynamic sampling, and the final intake.

    Args:
        kind: The rule by which groups start.
        lengths: Tokens of each completion of all groups that may start.
        alive: Whether each group has a signal.
        group: Completions per prompt.
        wanted: Groups that the step trains on.
        share: Expected share of groups with a signal.
    """
    intake, pace, taken = kind(wanted, len(alive), share), Pace(), list[int]()
    left: dict[int, list[int]] = {}
    while intake.last is None:
        running = sum(map(len, left.values()))
        for number in intake.start(wanted - -(-running // group)):
            left[number] = list(lengths[number * group : (number + 1) * group])
        running = sum(map(len, left.values()))
        taken.append(as_the_engine(running, taken[-1] if taken else None))
        for number, tokens in list(left.items()):
            left[number] = [count - pace.round_steps for count in tokens if count > pace.round_steps]
            if not left[number]:
                del left[number]
                intake.judge(number, alive[number])
    return taken, intake


def simulate_dapo(
    spec: str,
    samples: int,
    most: int,
    group: int,
    measured: dict[int, float],
    dead: float,
    batches: int = 3,
    draws: int = 30,
) -> list[dict[str, Any]]:
    """Return a result row per intake rule: seconds of decoding, groups started and groups needed.

    Args:
        spec, samples, most, group, measured: As in `simulate`.
        dead: Probability that a group has no signal.
        batches: Maximum number of further groups, in multiples of the groups of the step.
        draws: Number of draws to average over.
    """
    wanted = samples // group
    every = wanted * (1 + batches)
    found = []
    for name, kind in INTAKES.items():
        seconds, started, needed = list[float](), list[int](), list[int]()
        for seed in range(draws):
            draw = random.Random(seed)
            lengths = draw_lengths(spec, every * group, most, seed)
            alive = [draw.random() >= dead for _ in range(every)]
            taken, intake = filled(kind, lengths, alive, group, wanted, 1 - dead)
            seconds.append(sum(Pace().round_steps * milliseconds(rows, measured) for rows in taken) / 1e3)
            started.append(intake.started)
            needed.append(intake.last or 0)
        found.append(
            {
                "lengths": spec, "samples": samples, "most": most, "dead": dead, "rule": name,
                "decode_s": statistics.fmean(seconds), "started_groups": statistics.fmean(started),
                "needed_groups": statistics.fmean(needed),
            }
        )  # fmt: skip
    return found


def refilled(
    lengths: Sequence[int], group: int, wanted: int, max_staleness: int
) -> list[tuple[list[int], list[int]]]:
    """Simulate rollouts whose rows are refilled across steps.

    Args:
        lengths: Tokens of each completion of all groups, for a whole number of steps.
        group: Completions per prompt.
        wanted: Groups that a step trains on.
        max_staleness: Optimizer steps that a group may start early.

    Returns:
        Per optimizer step: rows of the decode step of each round, and tokens by age, 0, 1, 2 ... steps.
    """
    window, pace, steps = StalenessWindow(wanted, max_staleness), Pace(), len(lengths) // (group * wanted)
    left: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}  # by group, tokens drawn in each step
    found: list[tuple[list[int], list[int]]] = []
    present: int | None = None
    for step in range(steps):
        taken = list[int]()
        present = present if max_staleness else None  # a new session
        while any(number in left or number >= window.started for number in window.needed(step)):
            running = sum(map(len, left.values()))
            for number in window.start(step, steps, wanted - -(-running // group)):
                left[number] = list(lengths[number * group : (number + 1) * group])
                tokens[number] = [0] * steps
            present = as_the_engine(sum(map(len, left.values())), present)
            taken.append(present)
            for number, own in list(left.items()):
                tokens[number][step] += sum(min(count, pace.round_steps) for count in own)
                left[number] = [count - pace.round_steps for count in own if count > pace.round_steps]
                if not left[number]:
                    del left[number]
        trained = [tokens.pop(number) for number in window.needed(step)]
        ages = range(min(step, max_staleness) + 1)
        found.append((taken, [sum(own[step - age] for own in trained) for age in ages]))
    return found


def simulate_refilled(
    spec: str,
    samples: int,
    most: int,
    group: int,
    measured: dict[int, float],
    max_staleness: int,
    steps: int = 60,
) -> dict[str, Any]:
    """Return seconds of decoding per step, mean and largest age of its tokens, and wasted share of row steps.

    Args:
        spec, samples, most, group, measured: As in `simulate`.
        max_staleness: Optimizer steps that a group may start early.
        steps: Optimizer steps; the first 10 and the last 1 + ``max_staleness`` are not counted, as too little
            precedes or follows them.
    """
    lengths = draw_lengths(spec, samples * steps, most)
    every = refilled(lengths, group, samples // group, max_staleness)[10 : -1 - max_staleness]
    round_steps = Pace().round_steps
    seconds = [sum(round_steps * milliseconds(rows, measured) for rows in taken) / 1e3 for taken, _ in every]
    by_age = [sum(each[age] for _, each in every) for age in range(max_staleness + 1)]
    computed = round_steps * sum(sum(taken) for taken, _ in every)
    return {
        "lengths": spec, "samples": samples, "most": most, "max_staleness": max_staleness,
        "decode_s": statistics.fmean(seconds), "slowest_s": max(seconds),
        "mean_age": sum(age * count for age, count in enumerate(by_age)) / sum(by_age),
        "max_age": max(age for age, count in enumerate(by_age) if count),
        "wasted": 1 - sum(by_age) / computed,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run `python -m bench tail` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench tail", description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", nargs="+", default=["lognormal:400", "uniform", "equal"], help=KINDS)
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--most", type=int, default=1024, help="tokens of the longest completion")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument(
        "--steps", default="rollout-7b-h100", help="result whose nvfp4 rows have the times of steps"
    )
    parser.add_argument("--dead", type=float, help="share of groups without signal, with dynamic sampling")
    parser.add_argument(
        "--max_staleness", type=int, nargs="+", help="steps that groups may start early, with refilled rows"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    measured = nvfp4_steps(args.steps)
    rows: list[dict[str, Any]] = []
    for spec in args.lengths:
        for samples in args.samples:
            for early in args.max_staleness or ():
                row = simulate_refilled(spec, samples, args.most, args.group, measured, early)
                rows.append(row)
                print(
                    f"{spec} x {samples}, {early} steps early: {row['decode_s']:.2f} s of decoding a step, "
                    f"tokens {row['mean_age']:.2f} steps old, at most {row['max_age']}; {row['wasted']:.1%} "
                    "of row steps wasted"
                )
            if args.max_staleness:
                continue
            if args.dead is not None:
                for row in simulate_dapo(spec, samples, args.most, args.group, measured, args.dead):
                    rows.append(row)
                    print(
                        f"{spec} x {samples}, {row['rule']}: {row['decode_s']:.2f} s of decoding, "
                        f"{row['started_groups']:.1f} groups started, {row['needed_groups']:.1f} needed"
                    )
                continue
            for row in simulate(spec, samples, args.most, args.group, measured):
                rows.append(row)
                print(
                    f"{spec} x {samples}, {row['rule']}: {row['wasted']:.1%} of {row['row_steps']} row steps "
                    f"wasted, {row['decode_s']:.2f} s of decoding"
                )
    if args.out:
        write_result(args.out, " ".join(["tail", *arguments]), rows, steps_of=args.steps)
