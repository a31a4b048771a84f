"""The score of a policy on a task, as it is printed and as it lies in result.json."""

from dataclasses import dataclass, field
from typing import Any


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


def result_from_json(values: dict[str, Any]) -> EvalResult:
    """The result that a result.json holds.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: It is none.
    """
    read = dict(values)
    read["interval"] = tuple(values["interval"])
    read["pass_at"] = {int(k): share for k, share in values["pass_at"].items()}
    read["pass_intervals"] = {int(k): tuple(pair) for k, pair in values.get("pass_intervals", {}).items()}
    read["strata"] = {
        name: Stratum(part["problems"], part["accuracy"], tuple(part["interval"]))
        for name, part in values.get("strata", {}).items()
    }
    return EvalResult(**read)
