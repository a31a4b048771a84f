"""Tables of right samples in training: when the needle is found, and by noisy or clean halves of a group.

Legend: a value of a run is a number; a cell is its mean over test seeds with the 95 % interval of that mean.
"""

from collections.abc import Mapping
from typing import Any

from lab.study.results import ROLLOUT_ENTROPY, RunResult
from lab.writers.captions import table
from lab.writers.study_tables import difference, mean_of, noisy_steps, source, spread, study

RIGHT = "rewards/accuracy/mean"
"""Key of a step's share of right samples."""

PLAIN = "none"
"""The arm with which others are compared."""


def discovery(name: str) -> str:
    """Return the table of the steps in which each arm finds the needle, and in which half its samples do."""
    results, lines = study(name), []
    for arm in results.study.arms:
        runs = results.tested(arm)
        if len(runs) > 1:
            cells = []
            for when in (first_found, half_found):
                cells.append(spread([when(run) for run in runs], 1))
                more = difference(name, arm, PLAIN, when, 1).rpartition(",")[0]
                cells.append("" if arm == PLAIN else more)
            entropy = spread([mean_of(run, ROLLOUT_ENTROPY, [0]) for run in runs])
            lines.append((arm, entropy, *cells))
    head = (
        "arm", "entropy of the first step", "first right sample, step", "more than none",
        "half are right, step", "more than none",
    )  # fmt: skip
    samples = results.study.prompts_per_step * results.study.samples_per_prompt
    prior = float(results.study.task_options["prior"])
    expected = 1 / (1 - (1 - prior) ** samples)
    return table(
        head,
        lines,
        f"Steps of {samples} samples, from 1; of half, the first step in which so many are. Of the untrained "
        f"policy the first is expected in step {expected:.1f}. Differences are paired by seed. "
        f"{source(name)}",
    )


def first_found(run: RunResult) -> float:
    """Return the first step, from 1, with a right sample; one past the last if there is none."""
    return _first(run, 0.0)


def half_found(run: RunResult) -> float:
    """Return the first step, from 1, with half of its samples right; one past the last if there is none."""
    return _first(run, 0.5 - 1e-9)


def _first(run: RunResult, above: float) -> float:
    values = run.steps[RIGHT]
    return next(
        (float(at) for at, value in enumerate(values, 1) if value is not None and value > above),
        len(values) + 1.0,
    )


def halves(tasks: Mapping[str, str]) -> str:
    """Return the table of right noisy and clean samples of the same groups, over the steps with noise.

    Args:
        tasks: Names of studies by the name of their task.
    """
    lines: list[tuple[Any, ...]] = []
    for task, name in tasks.items():
        results = study(name)
        for arm, fields in results.study.arms.items():
            runs = results.tested(arm) if fields.noise_share < 1 else []
            if len(runs) > 1:
                lines.append(
                    (
                        f"{task}: {arm}",
                        *_parts(runs, "noisy", "clean"),
                        *_parts(runs, "only_noisy", "only_clean"),
                    )
                )
    if not lines:
        return "No arm with clean and noisy samples has run yet.\n"
    head = (
        "study and arm", "noisy samples right", "clean ones", "difference",
        "problems that only the noisy solve", "only the clean", "difference",
    )  # fmt: skip
    return table(head, lines, "Mean of the steps with noise; 95 % intervals over seeds.")


def _parts(runs: list[RunResult], *keys: str) -> tuple[str, str, str]:
    """Format the means of two keys over the runs' noisy steps, and their difference."""
    noisy, clean = ([mean_of(run, key, noisy_steps(run)) for run in runs] for key in keys)
    more = [one - other for one, other in zip(noisy, clean, strict=True)]
    return spread(noisy), spread(clean), spread(more, sign="+")
