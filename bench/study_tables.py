"""Tables of studies for the docs, from the results of `qerl study` in bench/results.

A study that is not there yet, or an arm of one, gets a sentence or the words `not run` in place of numbers,
so that a page stands before its results come. `python -m bench.draw` draws the figures from the same files.
"""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, stdev

import numpy as np

from bench.captions import table
from bench.result import RESULTS
from qerl.report.metrics import number
from qerl.study.results import SIGMA, Results, RunResult, read_results
from qerl.study.statistics import FEWEST, Comparison, bca, compare, mean_interval

NOT_RUN = "not run"


@cache
def study(name: str) -> Results | None:
    """The results of a study by the name of their file; None where there are none."""
    path = RESULTS / f"{name}.json.gz"
    return read_results(path) if path.is_file() else None


@cache
def compared(name: str) -> list[Comparison]:
    """All comparisons of a study whose arms have run."""
    results = study(name)
    return [] if results is None else compare(results)


def absent(name: str) -> str:
    """What a page says in place of a table of results that are not there."""
    return f"No results yet: bench/results has no {name}.json.gz.\n"


def comparisons(name: str, *families: str) -> str:
    """Table of the comparisons of some families, in the study's order, and which of them have not run."""
    results, lines = study(name), []
    if results is None:
        return absent(name)
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
    return table(head, lines, source(name) + f" Not run: {missing}." * bool(missing))


def arms(name: str) -> str:
    """Table of the arms of a study on the test seeds, each at its learning rate."""
    results, lines = study(name), []
    if results is None:
        return absent(name)
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


def rates(name: str) -> str:
    """Table of every arm at every learning rate on the seeds that choose one; the chosen one is bold."""
    results, lines = study(name), []
    if results is None:
        return absent(name)
    tried = sorted(results.study.learning_rates)
    for arm in results.study.arms:
        found = [results.of(arm, rate, results.study.tuning_seeds) for rate in tried]
        if all(len(of_rate) > 1 for of_rate in found):
            cells = []
            for rate, of_rate in zip(tried, found, strict=True):
                areas = [run.area for run in of_rate]
                cell = f"{fmean(areas):.3f} ({stdev(areas):.3f})"
                cell = f"**{cell}**" if rate == results.rate(arm) else cell
                cells.append(f"{cell}, {sum(map(results.collapsed, of_rate))}")
            lines.append((arm, *cells))
    caption = (
        f"Mean area (SD) and collapses of {len(results.study.tuning_seeds)} seeds that no comparison uses; "
        f"bold is what was chosen. {source(name)}"
    )
    return table(("arm, at the learning rate", *(f"{rate:g}" for rate in tried)), lines, caption)


def most(name: str, metric: str) -> str:
    """The largest mean of a score at the end, over the arms' test seeds, with its interval and its arm.

    An arm with a random error in its weights is no way to train and does not count.
    """
    results = study(name)
    if results is None:
        return NOT_RUN
    ends = {
        arm: [100 * (run.evaluations[metric][-1] or 0.0) for run in runs]
        for arm, fields in results.study.arms.items()
        if not fields.frozen_noise and len(runs := results.tested(arm)) > 1
    }
    best = max(ends, key=lambda arm: fmean(ends[arm]))
    return f"{spread(ends[best], 1)} % (`{best}`)"


def runs(*names: str) -> int:
    """How many runs studies have, together."""
    return sum(len(results.runs) for results in map(study, names) if results is not None)


def difference(
    name: str, first: str, second: str, value: Callable[[RunResult], float], digits: int = 3
) -> str:
    """Mean difference of two arms in a value of a run, paired by seed, with its interval and the seeds.

    Seeds for which the value of a run is no number are left out.
    """
    results = study(name)
    if results is None or not {first, second} <= results.study.arms.keys():
        return NOT_RUN
    others = {run.run.seed: run for run in results.tested(second)}
    pairs = [(run, others[run.run.seed]) for run in results.tested(first) if run.run.seed in others]
    found = np.array([value(one) - value(other) for one, other in pairs])
    found = found[np.isfinite(found)]
    if len(found) < FEWEST:
        return NOT_RUN
    low, high = bca(found)
    return f"{found.mean():+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f}), {len(found)} seeds"


def noisy_steps(run: RunResult) -> list[int]:
    """0-based steps with noise."""
    return [at for at, sigma in enumerate(run.steps.get(SIGMA, [])) if sigma]


def mean_of(run: RunResult, key: str, at: Sequence[int] | None = None) -> float:
    """Mean of what was logged in some steps, or all, where it is a number; NaN where it never is."""
    values = run.steps.get(key, [])
    found = values if at is None else [values[step] for step in at if step < len(values)]
    known = [value for value in found if value is not None]
    return fmean(known) if known else float("nan")


def spread(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean over seeds with its interval; seeds without a number are left out.

    Args:
        values: One of each seed.
        digits: After the point.
        sign: `+` to show the sign of positive numbers.
    """
    known = np.array([value for value in values if np.isfinite(value)])
    if len(known) < FEWEST:
        return NOT_RUN
    low, high = mean_interval(known[:, None])
    words = [f"{value:{sign}.{digits}f}" for value in (known.mean(), low[0], high[0])]
    return f"{words[0]} ({words[1]} to {words[2]})"


def pair_words(first: str, second: str) -> str:
    """A pair of arms in words."""
    return f"{first} \N{MINUS SIGN} {second}"


def source(name: str) -> str:
    """Caption: how many runs, on what, and the file."""
    results = study(name)
    assert results is not None
    devices = ", ".join(sorted({str(run.facts["device"]) for run in results.runs}))
    return (
        f"{results.study.model.split('/')[-1]} on {results.study.task} {results.study.task_options}: "
        f"{len(results.runs)} runs of {results.study.steps} steps, {devices}. File: {name}.json.gz."
    )
