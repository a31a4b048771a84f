"""From runs on seeds that are not reported to the sigmas or temperatures that hold a KL, stage by stage.

    python -m lab doses runs/doses/results.json.gz 0.003 0.01 0.03 0.1 > runs/doses.yaml

An arm that explores at strength x (sigma of a noise, or temperature minus 1) has a KL of c x^2 while x is
small, in nats per token. Each arm of the study gives such a point in each stage: c, the mean of KL / x^2 over
its runs and the stage's steps, and the root mean square of x. Through one point the law itself is drawn, and
between the points of several arms of a kind (`aqn`, `aqn_03`) the line in logarithms. What is printed is a
part of a study, arms with `noise_sigma_stages` or `temperature_stages`: no controller, which would lag. The
first stage, and any other in which no arm of the kind explores, stays as it is.

Beyond small x the law fails, so a second turn fits where the first one ends: a study of the first turn's arms
beside those that are printed, on the same seeds, and this command without a KL, which gives each arm the dose
that its name says. Look at `sampling/kl` of what runs afterwards.

A policy that has settled, so that it is sure of each token, has no strength at which this holds: what leaves
its tokens as they are is no distance, and what changes them is one of many nats. From the first stage on in
which half of an arm's runs have settled the arm gives no points, and where none does a strength stays as it
was in the stage before.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from lab.study.arms import Arm
from lab.study.results import SIGMA, Results, RunResult, read_results
from qerl.errors import QeRLError

KL, ENTROPY, TEMPERATURE = "sampling/kl", "entropy", "temperature"

SETTLED = 0.02
"""Entropy of a policy, nats per token, below which it has settled."""


def steps_of(steps: int, stages: int) -> list[range]:
    """The 0-based steps of each stage; those that are left over belong to the last one."""
    length = steps // stages
    return [range(i * length, steps if i == stages - 1 else (i + 1) * length) for i in range(stages)]


def open_stages(runs: Sequence[RunResult], stages: int) -> int:
    """Stages before the first one in which at least half of the runs have settled."""
    for stage, steps in enumerate(steps_of(len(runs[0].steps[KL]), stages)):
        if median(_means(runs, ENTROPY, steps) or [0.0]) < SETTLED:
            return stage
    return stages


def delivered(runs: Sequence[RunResult], stages: int) -> list[float]:
    """Mean KL of each stage over runs, nats per token; NaN where none of them computed anything."""
    of_stages = steps_of(len(runs[0].steps[KL]), stages)
    return [fmean(_means(runs, KL, steps) or [math.nan]) for steps in of_stages]


def _means(runs: Sequence[RunResult], key: str, steps: range) -> list[float]:
    """The mean of a metric in these steps, of each run that has it; one that has diverged has nothing."""
    each = [[value for at in steps if (value := run.steps[key][at]) is not None] for run in runs]
    return [fmean(values) for values in each if values]


def dose_of(arm: str) -> float | None:
    """The dose in an arm's name, nats per token, as `arms_at` writes it; None of other names."""
    digits = arm.rpartition("_")[2]
    return float(f"0.{digits}") if digits.isdecimal() else None


def stages_of(arms: Sequence[Sequence[RunResult]], wanted: float, stages: int) -> list[float] | None:
    """Strength in each stage that holds a KL; None of arms that do not explore.

    Args:
        arms: Runs of each arm of one kind: all have noise in their norms, or another temperature.
        wanted: KL(sampler || trainer), nats per token.
        stages: How many.

    Returns:
        sigma of each stage, 0 where no run has noise, or factors of the temperature, 1 where that is 1.
    """
    steps = len(arms[0][0].steps[KL])
    if steps < stages:
        raise QeRLError(f"The runs have {steps} steps and the doses {stages} stages; lower --stages.")
    noisy = any(value for runs in arms for run in runs for value in run.steps[SIGMA])
    if not noisy and not any(
        _strength(run, at, noisy) for runs in arms for run in runs for at in range(steps)
    ):
        return None
    still_open = [open_stages(runs, stages) for runs in arms]
    found: list[float] = []
    for stage, within in enumerate(steps_of(steps, stages)):
        points = [
            point
            for runs, end in zip(arms, still_open, strict=True)
            if stage < end and (point := _point(runs, within, noisy))
        ]
        settled = stage >= max(still_open)
        x = (found[-1] if found else 0.0) if settled else _at(sorted(points), wanted) if points else 0.0
        found.append(x)
    return [float(f"{x if noisy else 1 + x:.4g}") for x in found]


def _point(runs: Sequence[RunResult], within: range, noisy: bool) -> tuple[float, float] | None:
    """Strength and KL of an arm in some steps, under the law; None of an arm that does not explore there."""
    both = [
        (x, kl)
        for run in runs
        for at in within
        if (x := _strength(run, at, noisy)) and (kl := run.steps[KL][at]) is not None
    ]
    if not both or not any(kl > 0 for _, kl in both):
        return None
    square = fmean(x**2 for x, _ in both)
    return math.sqrt(square), square * fmean(kl / x**2 for x, kl in both)


def _at(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """The strength at which a curve through points first has a KL; ahead of them and behind, by the law."""
    if wanted > points[0][1]:
        for (x, kl), (further, larger) in pairwise(points):
            if kl < wanted <= larger:
                return x * (further / x) ** (math.log(wanted / kl) / math.log(larger / kl))
    x, kl = points[0] if wanted <= points[0][1] else points[-1]
    return x * math.sqrt(wanted / kl)


def _strength(run: RunResult, at: int, noisy: bool) -> float:
    """sigma of a 0-based step, or what its factor of the temperature is above 1."""
    if noisy:
        return run.steps[SIGMA][at] or 0.0
    base = run.run.arm.temperature
    return (run.steps[TEMPERATURE][at] or base) / base - 1


def arms_at(
    results: Results, wanted: Sequence[float], stages: int, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Arms as a study's file has them: of these each that explores, at each KL; `aqn` at 0.03 is `aqn_03`.

    Args:
        results: Of the fit.
        wanted: KLs, nats per token; none for that which each arm's name ends with, as here it would.
        stages: How many strengths an arm gets.
        names: The arms; those of their kinds give points as well.
    """
    found = {}
    usual = asdict(Arm(""))
    for name in names:
        arm, own = results.study.arms[name], dose_of(name)
        kept = {
            key: value for key, value in asdict(arm).items() if value != usual[key] and key not in _FITTED
        }
        kind = name if own is None else name.rpartition("_")[0]
        alike = [other for other in results.study.arms if other == kind or _is_dose_of(kind, other)]
        runs = [found_runs for other in alike if (found_runs := results.of(other))]
        for kl in (list(wanted) or ([] if own is None else [own])) if runs else ():
            strengths = stages_of(runs, kl, stages)
            if strengths is not None:
                key = "noise_sigma_stages" if arm.noise else "temperature_stages"
                of = name if wanted else kind
                found[f"{of}_{f'{kl:f}'.rstrip('0').partition('.')[2]}"] = kept | {key: strengths}
    return found


def _is_dose_of(kind: str, arm: str) -> bool:
    return dose_of(arm) is not None and arm.rpartition("_")[0] == kind


_FITTED = (
    "name", "noise_target_kl", "noise_sigma_start", "noise_sigma_end", "noise_stages", "noise_schedule",
    "noise_sigma_stages", "temperature_stages",
)  # fmt: skip
"""Fields that strengths by stage replace."""


def main(arguments: list[str]) -> None:
    """Runs `python -m lab doses` with these arguments.

    Raises:
        QeRLError: The file holds no results of a study, or not of an arm.
    """
    parser = argparse.ArgumentParser(prog="python -m lab doses", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="a study's results.json.gz")
    parser.add_argument(
        "kl", type=float, nargs="*", help="nats per token, below 1; without one that of each arm's name"
    )
    parser.add_argument("--stages", type=int, default=5, help="of equal length")
    parser.add_argument("--arms", nargs="+", help="of the study; all that explore")
    args = parser.parse_args(arguments)
    results = read_results(args.results)
    if unknown := set(args.arms or ()) - results.study.arms.keys():
        raise QeRLError(f"{args.results} has no arm {min(unknown)}; it has {', '.join(results.study.arms)}.")
    found = arms_at(results, args.kl, args.stages, args.arms or list(results.study.arms))
    print("arms:")
    for name, fields in found.items():
        print(f"  {name}: {yaml.safe_dump(fields, default_flow_style=True, width=10**6).strip()}")
