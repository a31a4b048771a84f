"""Several policies on several tasks: averages, a table, and which policy is the best.

The average gives each task the same weight, however many problems it has, and its interval takes the problems
of the tasks as independent (`qerl.eval.interval.mean_interval`). The best policy is the one with the highest
average. Of many policies that are equally good one is the best by chance, so it is said where the next one
lies within the best one's interval; and its score is flattered by the choice, so a last score wants other
problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from qerl.eval.interval import mean_interval
from qerl.eval.result import EvalResult


@dataclass(frozen=True)
class Standing:
    """One policy on all tasks.

    Attributes:
        label: What the policy is called; no two have the same.
        results: By the task's name.
    """

    label: str
    results: dict[str, EvalResult]

    @property
    def average(self) -> float:
        """Mean accuracy over tasks, a share of one."""
        return fmean(result.accuracy for result in self.results.values())

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of it."""
        scored = list(self.results.values())
        return mean_interval([one.accuracy for one in scored], [one.interval for one in scored])

    def as_json(self) -> dict[str, Any]:
        """What the policy has scored, as plain JSON values."""
        return {
            "policy": self.label,
            "average": self.average,
            "interval": list(self.interval),
            "tasks": {
                name: {
                    "accuracy": result.accuracy,
                    "interval": list(result.interval),
                    "pass_at": result.pass_at,
                    "problems": result.problems,
                    "samples": result.samples,
                }
                for name, result in self.results.items()
            },
        }


def best_first(standings: Sequence[Standing]) -> list[Standing]:
    """The policies by falling average; of equal ones the earlier first."""
    return sorted(standings, key=lambda standing: -standing.average)


def table(standings: Sequence[Standing]) -> Table:
    """A row for each policy, a column for each task and one for the average, in per cent."""
    tasks = list(standings[0].results)
    grid = Table(title="accuracy in % (95 % interval)")
    grid.add_column("policy", overflow="fold")
    for name in tasks:
        samples = standings[0].results[name].samples
        grid.add_column(name if samples == 1 else f"{name} avg@{samples}", justify="right")
    if len(tasks) > 1:
        grid.add_column("average", justify="right")
    for standing in standings:
        cells = [_percent(one.accuracy, one.interval) for one in standing.results.values()]
        if len(tasks) > 1:
            cells.append(_percent(standing.average, standing.interval))
        grid.add_row(standing.label, *cells)
    return grid


def verdict(standings: Sequence[Standing]) -> str:
    """Which of several policies is the best, and whether that may be chance, in a sentence."""
    best, second, *_ = best_first(standings)
    text = f"Best: {best.label}, {_percent(best.average, best.interval)} %"
    if second.average == best.average:
        return f"{text}; {second.label} has the same score, and the one named first is taken."
    gap = f"{100 * (best.average - second.average):.1f} points above {second.label}"
    if second.average >= best.interval[0]:
        return f"{text}, {gap}, which lies within its interval, so the choice may be chance."
    return f"{text}, {gap}."


def _percent(share: float, interval: tuple[float, float]) -> str:
    low, high = (100 * bound for bound in interval)
    return f"{100 * share:.1f} ({low:.1f} to {high:.1f})"
