"""Scores: of a policy on a task, as printed and as in result.json, and of several policies on several tasks.

The average of a policy gives each task the same weight, however many problems it has, and its interval takes
the problems of the tasks as independent (`qerl.eval.interval.mean_interval`). The best policy is the one with
the highest average. Of many policies that are equally good one is the best by chance, so it is said where the
next one lies within the best one's interval; and its score is flattered by the choice, so a last score wants
other problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.table import Table

from qerl.eval.interval import mean_interval


@dataclass(frozen=True)
class Stratum:
    """Score on the problems in which the task's column of strata has one value; units as in `EvalResult`."""

    problems: int
    accuracy: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class EvalResult:
    """Score of a policy on a task.

    Attributes:
        task: Name of the task.
        problems: Problems scored.
        samples: Completions per problem.
        accuracy: Share of right completions, averaged over problems (avg@K).
        interval: 95 % interval of the accuracy.
        pass_at: pass@k by k, for powers of two up to K.
        pass_intervals: 95 % interval of each.
        answered: Share of completions that state a final answer.
        failed: Completions whose answer could not be judged, by error or time limit; they count as wrong.
        errors: Completions that ended because logits were not finite; they count by what they say so far.
        truncated: Share of completions that reached max_tokens.
        mean_tokens: Mean length of a completion.
        settings: How completions were sampled.
        source: What was scored.
        versions: Of the libraries that matter.
        date: UTC, ISO 8601.
        strata: Scores by stratum, such as ``steps_2``; empty where the task has none.
        thoughts_closed_by: Share of completions whose thoughts were closed by ``budget`` or, where it closed
            none, by ``model``; empty without a budget of thinking.
    """

    task: str
    problems: int
    samples: int
    accuracy: float
    interval: tuple[float, float]
    pass_at: dict[int, float]
    answered: float
    failed: int
    errors: int
    truncated: float
    mean_tokens: float
    settings: dict[str, Any]
    source: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    strata: dict[str, Stratum] = field(default_factory=dict)
    pass_intervals: dict[int, tuple[float, float]] = field(default_factory=dict)
    thoughts_closed_by: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """The score as one line for people."""
        low, high = (100 * bound for bound in self.interval)
        kind = "accuracy" if self.samples == 1 else f"avg@{self.samples}"
        line = f"{self.task}: {kind} {100 * self.accuracy:.1f} % (95 % interval {low:.1f} to {high:.1f}, "
        line += f"{self.problems} problems)"
        if self.samples > 1:
            line += ", " + ", ".join(self._pass(k) for k in self.pass_at)
        if len(self.strata) > 1:
            parts = (f"{name} {100 * part.accuracy:.1f} %" for name, part in self.strata.items())
            line += f"; {', '.join(parts)}"
        line += f"; {100 * self.answered:.1f} % of the completions state an answer"
        if self.failed:
            line += f", {self.failed} of them could not be judged and count as wrong"
        if self.thoughts_closed_by:
            shares = [f"{100 * share:.1f} % by the {by}" for by, share in self.thoughts_closed_by.items()]
            line += f"; thoughts were closed in {' and in '.join(shares)}"
        if self.errors:
            line += f"; {self.errors} ended in logits that are not finite, so the model itself is damaged"
        return line

    def _pass(self, k: int) -> str:
        interval = self.pass_intervals.get(k)
        bounds = f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""
        return f"pass@{k} {100 * self.pass_at[k]:.1f} %{bounds}"


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
