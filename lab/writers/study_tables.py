"""Tables of studies for the docs, from the results of `python -m lab study` in bench/results.

A planned study without results gets a sentence, and a missing arm the words `not run`, in place of numbers,
so that a page can be written before its results exist. `python -m lab draw` draws the figures from the same
files.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean, stdev

import numpy as np

from bench.result import RESULTS, read_rows
from lab.study.arms import Arm
from lab.study.results import SIGMA, Results, RunResult, read_results
from lab.study.statistics import (
    FEWEST,
    Comparison,
    bca,
    compare,
    hodges_lehmann,
    hodges_lehmann_interval,
    mean_interval,
    wilcoxon,
)
from lab.writers.captions import table
from qerl.report.runs import number

NOT_RUN = "not run"

EARLIER = "noise-wp12-6b0a637"
"""A study of an earlier commit, which chose a learning rate for each arm."""


@cache
def study(name: str) -> Results:
    """Return the results of a study by the name of their file.

    Raises:
        QeRLError: The file is missing or holds something else.
    """
    return read_results(RESULTS / f"{name}.json.gz")


def study_or_none(name: str) -> Results | None:
    """Return the results of a planned study; None if their file is missing."""
    return study(name) if (RESULTS / f"{name}.json.gz").is_file() else None


@cache
def compared(name: str) -> list[Comparison]:
    """Return all comparisons of a study whose arms have run."""
    return compare(study(name))


def absent(name: str) -> str:
    """Return the sentence that replaces a table whose results are missing."""
    return f"No results yet: bench/results has no {name}.json.gz.\n"


def comparisons(name: str, *families: str) -> str:
    """Return the table of some families' comparisons in the study's order; its caption names the missing."""
    results, lines = study(name), []
    planned = [(family, *pair) for family in families for pair in results.study.comparisons.get(family, [])]
    for one in compared(name):
        if one.family in families:
            planned.remove((one.family, one.first, one.second))
            low, high = one.interval
            lines.append(
                (
                    pair_words(one.first, one.second),
                    f"{one.mean:+.3f}",
                    f"{low:+.3f} to {high:+.3f}",
                    number(one.holm),
                    f"{one.detectable:.3f}",
                    f"{one.collapses[0]} and {one.collapses[1]} of {one.seeds}",
                    one.verdict,
                )
            )
    head = ("arms", "difference of area", "95 % interval", "p, Holm", "detectable", "collapses", "verdict")
    missing = ", ".join(pair_words(first, second) for _, first, second in planned)
    if not lines:
        return f"{name}.json.gz has no finished comparison of this kind{f': {missing}' * bool(missing)}.\n"
    apart = ", ".join(
        pair_words(one.first, one.second) for one in compared(name) if one.apart and one.family in families
    )
    return table(
        head,
        lines,
        f"{source(name)} p is corrected over all {count(name)} comparisons of the study."
        + f" Not the noise's alone, since the two differ before it begins: {apart}." * bool(apart)
        + f" Not run: {missing}." * bool(missing),
    )


def count(name: str) -> int:
    """Return the number of comparisons of a study."""
    return sum(map(len, study(name).study.comparisons.values()))


def arms(name: str) -> str:
    """Return the table of the arms of a study on the test seeds, each at its learning rate."""
    results, lines = study(name), []
    for arm in results.study.arms:
        runs = results.tested(arm)
        if len(runs) > 1:
            areas, ends = [run.area for run in runs], [run.accuracy[-1] for run in runs]
            lines.append(
                (
                    arm,
                    f"{results.rate(arm):g}",
                    f"{fmean(run.accuracy[0] for run in runs):.3f}",
                    *(f"{fmean(values):.3f} ({stdev(values):.3f})" for values in (areas, ends)),
                    f"{sum(map(results.collapsed, runs))} of {len(runs)}",
                    sum(run.accuracy[-1] < run.accuracy[0] for run in runs),
                    sum(run.diverged_at is not None for run in runs),
                    ", ".join(sorted({run.commit for run in runs})),
                )
            )
    head = (
        "arm", "learning rate", "at the start", "area (SD)", "accuracy at the end (SD)", "collapsed",
        "ends below its start", "diverged", "commit",
    )  # fmt: skip
    below = f"Collapsed: ends below {results.study.collapse_below:g}, wherever it began."
    return table(head, lines, f"{source(name)} {below}")


def tuned(name: str) -> str:
    """Return the table of each arm at each learning rate of its own grid, on the tuning seeds."""
    results, lines = study(name), []
    for arm in results.study.arms:
        grid = sorted(results.study.rates(results.study.arms[arm]))
        for rate in grid:
            runs = results.of(arm, rate, results.study.tuning_seeds)
            if len(runs) > 1:
                areas = [run.area for run in runs]
                lines.append(
                    (
                        f"{arm}, {rate:g}",
                        f"{fmean(areas):.3f} ({stdev(areas):.3f})",
                        f"{sum(map(results.collapsed, runs))} of {len(runs)}",
                        _chosen(rate, results.rate(arm), grid),
                    )
                )
    caption = (
        f"{len(results.study.tuning_seeds)} seeds that no comparison uses. Taken is the largest mean area; "
        f"where that is an end of the grid, a rate beyond might be better. {source(name)}"
    )
    return table(("arm, learning rate", "area (SD)", "collapsed", "taken"), lines, caption)


def _chosen(rate: float, taken: float | None, grid: Sequence[float]) -> str:
    """Return whether an arm took this learning rate, and whether that is an end of its grid."""
    if rate != taken:
        return ""
    return "yes, an end" if rate in (grid[0], grid[-1]) else "yes"


def claimed() -> str:
    """Return the table of how often an effect is claimed for differences whose mean is 0."""
    rows = read_rows("verdicts")
    lines = [
        (
            row["differences"],
            row["comparisons"],
            *(f"{row[key]:.3f}" for key in ("helps", "harms", "outside")),
        )
        for row in rows
    ]
    return table(
        (
            "32 differences with a mean of 0",
            "comparisons of the study",
            "helps",
            "harms",
            "interval without 0",
        ),
        lines,
        f"Shares of {rows[0]['draws']} draws of the comparison with the smallest p. "
        f"{rows[0]['machine']}, {rows[0]['date'][:10]}, commit {rows[0]['commit']}. "
        "File: verdicts.json.",
    )


def tested(name: str, arm: str) -> list[RunResult]:
    """Return the test runs of an arm of a study; empty if the study has no such arm."""
    results = study(name)
    return results.tested(arm) if arm in results.study.arms else []


def by_seed(name: str, arm: str, value: Callable[[RunResult], float]) -> dict[int, float]:
    """Return a value of each test run of an arm, by seed; empty if the arm has not run."""
    return {run.run.seed: value(run) for run in tested(name, arm)}


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> np.ndarray:
    """Return the differences [seeds], first minus second, over common seeds, without those not finite."""
    found = np.array([first[seed] - second[seed] for seed in first if seed in second])
    return found[np.isfinite(found)]


def estimate(differences: np.ndarray, digits: int = 3) -> str:
    """Format the mean of paired differences [seeds] with its BCa interval."""
    if len(differences) < FEWEST:
        return NOT_RUN
    low, high = bca(differences)
    return f"{differences.mean():+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def centre(differences: np.ndarray, digits: int = 3) -> str:
    """Format the Hodges-Lehmann centre of paired differences [seeds] with its interval."""
    if len(differences) < FEWEST:
        return NOT_RUN
    low, high = hodges_lehmann_interval(differences)
    return f"{hodges_lehmann(differences):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def difference(
    name: str, first: str, second: str, value: Callable[[RunResult], float], digits: int = 3
) -> str:
    """Format the mean difference of two arms in a value of a run, by seed, with interval and seed count."""
    found = paired(by_seed(name, first, value), by_seed(name, second, value))
    words = estimate(found, digits)
    return words if words == NOT_RUN else f"{words}, {len(found)} seeds"


def area(run: RunResult) -> float:
    """Return the area under the accuracy curve."""
    return run.area


def after_the_fact(name: str, first: str, second: str) -> str:
    """Format the difference of areas of a pair that its study did not plan, with Wilcoxon's p alone."""
    found = paired(by_seed(name, first, area), by_seed(name, second, area))
    words = estimate(found)
    return words if words == NOT_RUN else f"{words}, p {number(wilcoxon(found))} uncorrected"


def collapses(names: Sequence[str], arm: str) -> str:
    """Format how many test runs of an arm collapsed, out of how many, over several studies."""
    found = [study(name).collapsed(run) for name in names for run in tested(name, arm)]
    return f"{sum(found)} of {len(found)}"


def has_noise(arm: Arm) -> bool:
    """Return True if an arm's sampler has noise, in norms or in logits."""
    return arm.noise or arm.logits_noise > 0


def noisy_steps(run: RunResult) -> list[int]:
    """Return the 0-based steps with noise."""
    return [at for at, sigma in enumerate(run.steps.get(SIGMA, [])) if sigma]


def early(noisy: Sequence[int]) -> list[int]:
    """Return the first quarter of the steps with noise, in which it is large."""
    return list(noisy[: len(noisy) // 4 or 1])


def mean_of(run: RunResult, key: str, at: Sequence[int] | None = None) -> float:
    """Return the mean of the values logged in some steps, or all; NaN if there are none."""
    values = run.steps.get(key, [])
    found = values if at is None else [values[step] for step in at if step < len(values)]
    known = [value for value in found if value is not None]
    return fmean(known) if known else float("nan")


def spread(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Format the mean over seeds with its interval; values that are not finite are left out.

    Args:
        values: One value per seed.
        digits: Digits after the point.
        sign: `+` to show the sign of positive numbers.
    """
    known = np.array([value for value in values if np.isfinite(value)])
    if len(known) < FEWEST:
        return NOT_RUN
    low, high = mean_interval(known[:, None])
    words = [f"{value:{sign}.{digits}f}" for value in (known.mean(), low[0], high[0])]
    return f"{words[0]} ({words[1]} to {words[2]})"


def pair_words(first: str, second: str) -> str:
    """Format a pair of arms."""
    return f"{first} \N{MINUS SIGN} {second}"


def source(name: str) -> str:
    """Return the caption's sentences on the runs, their device and the file."""
    results = study(name)
    devices = ", ".join(sorted({str(run.facts["device"]) for run in results.runs}))
    return (
        f"{results.study.model.split('/')[-1]} on {results.study.task} {results.study.task_options}: "
        f"{len(results.runs)} runs of {results.study.steps} steps, {devices}. File: {name}.json.gz."
    )
