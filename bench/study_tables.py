"""Tables of studies for the docs, from the results of `qerl study` in bench/results.

A study that is not there yet, or an arm of one, gets a sentence or the words `not run` in place of numbers,
so that a page stands before its results come. `python -m bench.draw` draws the figures from the same files.
"""

from collections.abc import Callable
from functools import cache
from statistics import fmean, stdev

import numpy as np

from bench.captions import table
from bench.result import RESULTS
from qerl.report.metrics import number
from qerl.study.results import Results, RunResult, read_results
from qerl.study.statistics import FEWEST, Comparison, bca, compare

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
                    sum(run.diverged_at is not None for run in runs),
                    ", ".join(sorted({run.commit for run in runs})),
                )
            )
    head = (
        "arm", "learning rate", "at the start", "area (SD)", "accuracy at the end (SD)", "collapsed",
        "diverged", "commit",
    )  # fmt: skip
    return table(head, lines, source(name))


def most(name: str, metric: str) -> float:
    """The largest mean of a score at the end, over the arms' test seeds; 0 where nothing has run."""
    results = study(name)
    if results is None:
        return 0.0
    ends = [[run.evaluations[metric][-1] for run in results.tested(arm)] for arm in results.study.arms]
    return max((fmean(value or 0.0 for value in end) for end in ends if len(end) > 1), default=0.0)


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
