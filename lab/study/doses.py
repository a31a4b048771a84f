"""From runs on seeds that are not reported to the sigmas or temperatures that hold a KL, stage by stage.

    python -m lab doses runs/doses/results.json.gz 0.003 0.01 0.03 0.1

An arm that explores at strength x (sigma of a noise, or temperature minus 1) has a KL of c x^2 while x is
small, in nats per token. Each arm of the study that explores gives c in each stage, as the mean of KL / x^2
over its runs and the stage's steps, so x = sqrt(KL / c) holds that distance there. The first stage, and any
other in which the arm does not explore, stays as it is. What is printed goes into an arm as
`noise_sigma_stages` or `temperature_stages`, without a controller, which would lag.

Beyond small x the law fails: fit at strengths near those that are wanted, and look at `sampling/kl` of what
runs.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from lab.study.results import SIGMA, RunResult, read_results
from qerl.errors import QeRLError

KL, TEMPERATURE = "sampling/kl", "temperature"


def stages_of(runs: Sequence[RunResult], wanted: float, stages: int) -> list[float] | None:
    """Strength in each stage that holds a KL; None of runs that do not explore.

    Args:
        runs: Of one arm, with noise in its norms or another temperature.
        wanted: KL(sampler || trainer), nats per token.
        stages: How many.

    Returns:
        sigma of each stage, 0 where the runs have none, or factors of the temperature, 1 where that is 1.
    """
    steps = len(runs[0].steps[KL])
    if steps < stages:
        raise QeRLError(f"The runs have {steps} steps and the doses {stages} stages; lower --stages.")
    noisy = any(value for run in runs for value in run.steps[SIGMA])
    base = runs[0].run.arm.temperature
    if not noisy and not any((value or base) != base for run in runs for value in run.steps[TEMPERATURE]):
        return None
    found, length = [], steps // stages
    for stage in range(stages):
        end = steps if stage == stages - 1 else (stage + 1) * length
        curvature = [
            kl / x**2
            for run in runs
            for at in range(stage * length, end)
            if (x := _strength(run, at, noisy, base)) and (kl := run.steps[KL][at]) is not None
        ]
        x = math.sqrt(wanted / fmean(curvature)) if curvature and fmean(curvature) > 0 else 0.0
        found.append(float(f"{x if noisy else 1 + x:.4g}"))
    return found


def _strength(run: RunResult, at: int, noisy: bool, base: float) -> float:
    """sigma of a 0-based step, or what its factor of the temperature is above 1."""
    if noisy:
        return run.steps[SIGMA][at] or 0.0
    return (run.steps[TEMPERATURE][at] or base) / base - 1


def main(arguments: list[str]) -> None:
    """Runs `python -m lab doses` with these arguments.

    Raises:
        QeRLError: The file holds no results of a study.
    """
    parser = argparse.ArgumentParser(prog="python -m lab doses", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="a study's results.json.gz")
    parser.add_argument("kl", type=float, nargs="+", help="nats per token")
    parser.add_argument("--stages", type=int, default=5)
    args = parser.parse_args(arguments)
    results = read_results(args.results)
    for arm in results.study.arms:
        if runs := results.of(arm):
            for wanted in args.kl:
                if (found := stages_of(runs, wanted, args.stages)) is not None:
                    key = "noise_sigma_stages" if runs[0].run.arm.noise else "temperature_stages"
                    print(f"{arm}, KL {wanted:g}: {key}: {found}")
