"""Tables of studies for the docs, from the results of `qerl study` in bench/results.

`qerl study bench/results/NAME.json.gz --figures docs/images` draws the figures from the same files.
"""

from functools import cache
from statistics import fmean, stdev

from bench.captions import table
from bench.result import RESULTS
from qerl.report.metrics import number
from qerl.study.results import Results, read_results
from qerl.study.statistics import Comparison, compare


@cache
def study(name: str) -> Results:
    """The results of a study by the name of their file."""
    return read_results(RESULTS / f"{name}.json.gz")


@cache
def compared(name: str) -> list[Comparison]:
    """All comparisons of a study."""
    return compare(study(name))


def comparisons(name: str, *families: str) -> str:
    """Table of the comparisons of some families, in the study's order."""
    lines = []
    for one in compared(name):
        if one.family in families:
            low, high = one.interval
            lines.append(
                (
                    f"{one.first} \N{MINUS SIGN} {one.second}",
                    f"{one.mean:+.3f}",
                    f"{low:+.3f} to {high:+.3f}",
                    number(one.holm),
                    f"{one.detectable:.3f}",
                    f"{one.collapses[0]} and {one.collapses[1]} of {one.seeds}",
                    one.verdict,
                )
            )
    head = ("arms", "difference of area", "95 % interval", "p, Holm", "detectable", "collapses", "verdict")
    return table(head, lines, source(name))


def arms(name: str) -> str:
    """Table of the arms of a study on the test seeds, each at its learning rate."""
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
    """The largest mean of a score at the end, over the arms' test seeds."""
    results = study(name)
    ends = [[run.evaluations[metric][-1] for run in results.tested(arm)] for arm in results.study.arms]
    return max(fmean(value or 0.0 for value in end) for end in ends if len(end) > 1)


def source(name: str) -> str:
    """Caption: how many runs, on what, and the file."""
    results = study(name)
    devices = ", ".join(sorted({str(run.facts["device"]) for run in results.runs}))
    return (
        f"{results.study.model.split('/')[-1]} on {results.study.task} {results.study.task_options}: "
        f"{len(results.runs)} runs of {results.study.steps} steps, {devices}. File: {name}.json.gz."
    )
