"""Fit the noise sigmas or temperatures that hold a given KL in each stage, from runs on unreported seeds.

    python -m lab doses runs/doses/results.json.gz 0.003 0.01 0.03 0.1 > runs/doses.yaml

While the strength x of an arm's exploration (sigma of its noise, or the factor of its temperature minus 1) is
small, its KL is c x^2, in nats per token. Each arm of the study gives one point per stage: the root mean
square of x, and c, the mean of KL / x^2 over its runs and the stage's steps. A single point is extended by
the law itself; between points of several arms of a kind (`aqn`, `aqn_03`) the curve is linear in logarithms.
The output is part of a study file: arms with `noise_sigma_stages` or `temperature_stages`, without a
controller, which would lag. The first stage, and any other in which no arm of the kind explores, stays
without exploration.

For larger x the law fails, so a second turn fits near the strengths of the first: run a study of the first
turn's arms and the printed arms on the same seeds, then this command without a KL, which gives each arm the
dose in its name. Check `sampling/kl` of the runs that use these doses.

A policy that has settled, so that it is certain of each token, has no strength at which the law holds: noise
that leaves its tokens unchanged gives no KL, and noise that changes them gives many nats. An arm gives no
points from the first stage on in which half of its runs have settled, and where no arm gives points the
strength of the previous stage is kept.
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
    """The 0-based steps of each stage; steps left over belong to the last stage."""
    length = steps // stages
    return [range(i * length, steps if i == stages - 1 else (i + 1) * length) for i in range(stages)]


def open_stages(runs: Sequence[RunResult], stages: int) -> int:
    """Number of stages before the first one in which at least half of the runs have settled."""
    for stage, steps in enumerate(steps_of(len(runs[0].steps[KL]), stages)):
        if median(_means(runs, ENTROPY, steps) or [0.0]) < SETTLED:
            return stage
    return stages


def delivered(runs: Sequence[RunResult], stages: int) -> list[float]:
    """Mean KL of each stage over runs, nats per token; NaN where no run has a finite value."""
    of_stages = steps_of(len(runs[0].steps[KL]), stages)
    return [fmean(_means(runs, KL, steps) or [math.nan]) for steps in of_stages]


def _means(runs: Sequence[RunResult], key: str, steps: range) -> list[float]:
    """Mean of a metric over these steps, per run that has a finite value there (a diverged run has none)."""
    each = [[value for at in steps if (value := run.steps[key][at]) is not None] for run in runs]
    return [fmean(values) for values in each if values]


def dose_of(arm: str) -> float | None:
    """The dose in an arm's name, nats per token, as `arms_at` writes it; None for other names."""
    digits = arm.rpartition("_")[2]
    return float(f"0.{digits}") if digits.isdecimal() else None


def stages_of(arms: Sequence[Sequence[RunResult]], wanted: float, stages: int) -> list[float] | None:
    """Strength in each stage that holds the wanted KL; None for arms that do not explore.

    Args:
        arms: Runs of each arm of one kind: all have noise in their norms, or all change the temperature.
        wanted: KL(sampler || trainer), nats per token.
        stages: Number of stages.

    Returns:
        sigma of each stage, 0 where no run has noise, or temperature factors, 1 where no run changes it.
    """
    steps = len(arms[0][0].steps[KL])
    if steps < stages:
        raise QeRLError(f"--stages is {stages}, more than the {steps} steps of the runs; lower it.")
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
    """Strength and KL of an arm over some steps, under the law; None if the arm does not explore there."""
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
    """The strength at which a curve through points first reaches a KL; outside their range, by the law."""
    if wanted > points[0][1]:
        for (x, kl), (further, larger) in pairwise(points):
            if kl < wanted <= larger:
                return x * (further / x) ** (math.log(wanted / kl) / math.log(larger / kl))
    x, kl = points[0] if wanted <= points[0][1] else points[-1]
    return x * math.sqrt(wanted / kl)


def _strength(run: RunResult, at: int, noisy: bool) -> float:
    """sigma of a 0-based step, or its temperature factor minus 1."""
    if noisy:
        return run.steps[SIGMA][at] or 0.0
    base = run.run.arm.temperature
    return (run.steps[TEMPERATURE][at] or base) / base - 1


def arms_at(
    results: Results, wanted: Sequence[float], stages: int, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Arms as in a study's file: each of these that explores, at each KL; `aqn` at 0.03 becomes `aqn_03`.

    Args:
        results: Results of the runs to fit.
        wanted: KLs, nats per token; if empty, each arm gets the dose at the end of its own name.
        stages: Number of strengths per arm.
        names: The arms; other arms of the same kinds also give points.
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
"""Fields that strengths per stage replace."""


def main(arguments: list[str]) -> None:
    """Run `python -m lab doses` with these arguments.

    Raises:
        QeRLError: The file holds no results of a study, or not of an arm.
    """
    parser = argparse.ArgumentParser(prog="python -m lab doses", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="a study's results.json.gz")
    parser.add_argument(
        "kl", type=float, nargs="*", help="KL in nats per token, below 1; default: that in each arm's name"
    )
    parser.add_argument("--stages", type=int, default=5, help="number of stages, of equal length")
    parser.add_argument("--arms", nargs="+", help="arms of the study; default: all that explore")
    args = parser.parse_args(arguments)
    results = read_results(args.results)
    if unknown := set(args.arms or ()) - results.study.arms.keys():
        raise QeRLError(f"{args.results} has no arm {min(unknown)}; it has {', '.join(results.study.arms)}.")
    found = arms_at(results, args.kl, args.stages, args.arms or list(results.study.arms))
    print("arms:")
    for name, fields in found.items():
        print(f"  {name}: {yaml.safe_dump(fields, default_flow_style=True, width=10**6).strip()}")
