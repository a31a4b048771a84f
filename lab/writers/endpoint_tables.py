"""Tables beyond a study's planned endpoint: the end of a run, other controls, the hard problems.

None of them was planned before the runs; they show effects that the planned comparisons leave out.

Legend: differences are paired by seed, with 95 % intervals over seeds; p is Wilcoxon's, uncorrected.
"""

from collections.abc import Callable
from statistics import fmean

import numpy as np

from lab.study.results import RunResult
from lab.study.statistics import wilcoxon
from lab.writers.captions import table
from lab.writers.draw import STUDIES as TASKS
from lab.writers.study_tables import (
    EARLIER,
    area,
    by_seed,
    collapses,
    estimate,
    has_noise,
    pair_words,
    paired,
    source,
    spread,
    study,
    tested,
)
from qerl.report.runs import number

PAPER = (
    ("uncorrected, as in the paper", "aqn_uncorrected", "none_uncorrected"),
    ("corrected", "aqn", "none"),
)
"""A variant of AQN in words, its arm, and the same arm without noise."""

PLAIN = "none"
"""The arm without any change, with which others are compared."""

CLEAN = (PLAIN, "none_uncorrected", "none_one_sided")
"""Arms of `wp12` without noise that differ only in the loss's correction for rounding."""

TWO_STEPS = "accuracy/steps_2"
"""Key of an evaluation's share of two-step problems answered right."""

ESCAPED = 0.1
"""Share of two-step problems above which a run has left the plateau of one-step answers; chosen after seeing
the results."""


def paper() -> str:
    """Return the table of AQN's effect with and without correction: over the run, at the end, collapses."""
    lines = []
    for words, first, second in PAPER:
        for task, name in TASKS.items():
            if task != "needle":
                names = (name, EARLIER) if (task, first) == ("wp12", "aqn") else (name,)
                of = f"{words}, {task}" + ", two runs of each seed" * (len(names) > 1)
                cells = [estimate(over_runs(names, first, second, value)) for value in (area, at_the_end)]
                lines.append((of, *cells, " and ".join(collapses(names, arm) for arm in (first, second))))
    return table(
        ("AQN minus the same without", "mean held-out accuracy over the run", "at the end", "collapsed"),
        lines,
        "Greedy accuracy without noise, paired by seed, with 95 % intervals over seeds. Two runs of each "
        "seed, at two commits, are averaged by seed.",
    )


def over_runs(
    names: tuple[str, ...], first: str, second: str, value: Callable[[RunResult], float]
) -> np.ndarray:
    """Return the differences [seeds] of two arms in a value of a run, averaged over studies by seed."""
    pairs = [(by_seed(name, first, value), by_seed(name, second, value)) for name in names]
    seeds = [seed for seed in pairs[0][0] if all(seed in one for pair in pairs for one in pair)]
    return np.array([fmean(one[seed] - other[seed] for one, other in pairs) for seed in seeds])


def at_the_end(run: RunResult) -> float:
    """Return the accuracy of the last evaluation."""
    return run.accuracy[-1]


def controls() -> str:
    """Return the table of noise on `wp12` against its own control and against the mean of four clean arms."""
    name = TASKS["wp12"]
    results, lines = study(name), []
    four = [*(by_seed(name, arm, area) for arm in CLEAN), by_seed(EARLIER, PLAIN, area)]
    mean = {seed: fmean(one[seed] for one in four) for seed in four[0] if all(seed in one for one in four)}
    for pairs in results.study.comparisons.values():
        for first, second in pairs:
            if has_noise(results.study.arms[first]) and second in CLEAN:
                runs = by_seed(name, first, area)
                both = [paired(runs, by_seed(name, second, area)), paired(runs, mean)]
                if results.rate(first) == results.rate(second) and all(map(len, both)):
                    cells = [cell for d in both for cell in (estimate(d), number(wilcoxon(d)))]
                    lines.append((pair_words(first, second), *cells))
    return table(
        ("arms", "beside its control", "p", "beside the mean of four arms without noise", "p"),
        lines,
        "Difference of areas, paired by seed, with 95 % intervals; p is Wilcoxon's, uncorrected. The four "
        f"are {', '.join(f'`{arm}`' for arm in CLEAN)} and the earlier study's `{PLAIN}`.",
    )


def two_steps() -> str:
    """Return the table of two-step problems each arm has right at the end, and of its runs that escaped."""
    name = TASKS["wp12"]
    results, lines = study(name), []
    plain = by_seed(name, PLAIN, two_steps_right)
    for arm in results.study.arms:
        found = by_seed(name, arm, two_steps_right)
        if len(found) > 1:
            lines.append(
                (
                    arm,
                    spread([100 * value for value in found.values()], 1),
                    None if arm == PLAIN else more_two_steps(arm),
                    None if arm == PLAIN else number(wilcoxon(paired(found, plain))),
                    f"{sum(map(_escaped, found.values()))} of {len(found)}",
                    f"{100 * max(found.values()):.1f}",
                )
            )
    head = (
        "arm", "right at the end, %", f"more than {PLAIN}", "p", f"runs above {100 * ESCAPED:g} %",
        "best run, %",
    )  # fmt: skip
    return table(
        head,
        lines,
        "Of the held-out problems of two steps. Differences are paired by seed, with 95 % intervals; p is "
        f"Wilcoxon's, uncorrected. {source(name)}",
    )


def more_two_steps(arm: str) -> str:
    """Format the difference to `PLAIN` in two-step problems right at the end, in percentage points."""
    name = TASKS["wp12"]
    found = paired(by_seed(name, arm, two_steps_right), by_seed(name, PLAIN, two_steps_right))
    return estimate(100 * found, 1)


def two_steps_right(run: RunResult) -> float:
    """Return the share of two-step problems answered right at the end; NaN for a task without them."""
    values = run.evaluations.get(TWO_STEPS)
    return (values[-1] or 0.0) if values else float("nan")


def escaped(arm: str | None = None) -> str:
    """Format how many runs of `wp12`, or of one arm, have left the plateau at the end, out of how many."""
    results = study(TASKS["wp12"])
    runs = results.runs if arm is None else tested(TASKS["wp12"], arm)
    return f"{sum(_escaped(two_steps_right(run)) for run in runs)} of {len(runs)}"


def still_rising() -> str:
    """Format how many of the escaped runs had fewer right at the evaluation before the last."""
    results = study(TASKS["wp12"])
    found = [run.evaluations[TWO_STEPS] for run in results.runs if _escaped(two_steps_right(run))]
    return f"{sum((values[-2] or 0.0) < (values[-1] or 0.0) for values in found)} of {len(found)}"


def below_start(*arms: str) -> str:
    """Format how many test runs of each arm of `wp12` end below where they began, out of how many."""
    runs = [tested(TASKS["wp12"], arm) for arm in arms]
    *counts, last = [str(sum(run.accuracy[-1] < run.accuracy[0] for run in each)) for each in runs]
    (of,) = {len(each) for each in runs}
    return f"{', '.join(counts)}{' and ' * bool(counts)}{last} of {of}"


def _escaped(value: float) -> bool:
    return value > ESCAPED
