"""Runs of a report: labels, settings, the metrics to show, and their curves.

Smoothing is a centred mean over a window of about a tenth of the run. Unlike an exponential average it does
not lag, so curves of different runs can be compared step by step. Given up: the last points still move a
little while the run goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qerl.run_folder import LARGEST, path_labels, read_metrics, read_settings


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl.

    Attributes:
        key: As logged.
        title: Name in the report.
        unit: On the axis, empty for a pure number.
        better: Whether high or low values are better; None if neither are.
        share: True if logged as a share of one and shown in per cent.
        smooth: True if it is noisy; False for a schedule, which is drawn as steps.
    """

    key: str
    title: str
    unit: str = ""
    better: Literal["high", "low"] | None = None
    share: bool = False
    smooth: bool = True

    @property
    def scale(self) -> float:
        """Shown value / logged value."""
        return 100.0 if self.share else 1.0


METRICS = (
    Metric("reward", "Reward", better="high"),
    Metric("eval_reward", "Reward on held-out problems", better="high"),
    Metric("rewards/accuracy/mean", "Accuracy of samples", "%", better="high", share=True),
    Metric("eval_rewards/accuracy/mean", "Accuracy on held-out problems", "%", better="high", share=True),
    Metric("entropy", "Policy entropy", "nats per token"),
    Metric("rollout/entropy", "Entropy of the sampler, noise included", "nats per token"),
    Metric("noise/sigma", "Noise sigma", smooth=False),
    Metric("completions/mean_length", "Completion length, mean", "tokens"),
    Metric("completions/clipped_ratio", "Completions cut at the limit", "%", better="low", share=True),
    Metric("thinking/closed_by_model", "Thoughts that the model closed", "%", share=True),
    Metric("thinking/closed_by_budget", "Thoughts that the budget closed", "%", better="low", share=True),
    Metric("rollout/tokens_per_second", "Rollout speed", "tokens/s", better="high"),
    Metric("time/rollout", "Time of rollout", "s per step", better="low"),
    Metric("time/update", "Time of update", "s per step", better="low"),
    Metric("sampling/kl", "KL of sampler and trainer", "nats per token"),
)


ACCURACIES = ("rewards/accuracy/mean", "eval_rewards/accuracy/mean")
"""Metrics computed from the task's own answers."""


def number(value: float) -> str:
    """Format with three significant digits; from a thousand on as a whole number in groups of three."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}".replace(",", "\N{THIN SPACE}")
    return f"{value:.3g}"


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        label: Its name on the page; no two runs share it.
        folder: The run folder.
        rows: Its metrics, see `read_metrics`.
        settings: Its config.yaml with nested keys joined by dots, None where there is no such file.
    """

    label: str
    folder: Path
    rows: list[dict[str, Any]]
    settings: dict[str, Any] | None

    @property
    def last_step(self) -> int:
        """Last logged step; 0 before the first."""
        return max((row["step"] for row in self.rows), default=0)


@dataclass(frozen=True)
class Series:
    """One metric of one run.

    Attributes:
        steps: Optimizer steps at which it was logged.
        values: Its values, all finite.
        left_out: Logged values that were not finite, or beyond 1e100.
    """

    steps: list[int]
    values: list[float]
    left_out: int = 0

    @property
    def smoothed(self) -> list[float]:
        """The values, each averaged with its neighbours."""
        return smooth(self.values, window(len(self.values)))

    @property
    def tail_mean(self) -> float:
        """Mean of the last tenth of the values, of at least one."""
        tail = self.values[-max(1, len(self.values) // 10) :]
        return sum(tail) / len(tail)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders, and give each a distinct label.

    Raises:
        QeRLError: A folder is given twice or is not a run.
    """
    runs = []
    for label, folder in zip(path_labels(folders, "run"), folders, strict=True):
        settings = read_settings(folder)
        flat = None if settings is None else _flatten(settings)
        runs.append(Run(label, folder, read_metrics(folder), flat))
    return runs


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def series(rows: Sequence[dict[str, Any]], key: str) -> Series | None:
    """A metric by step, None where it was never logged as a number that can be drawn."""
    logged = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    finite = [(step, float(value)) for step, value in logged if abs(value) < LARGEST]  # False for NaN
    if not finite:
        return None
    steps, values = zip(*finite, strict=True)
    return Series(list(steps), list(values), len(logged) - len(finite))


def shown_series(run: Run, metric: Metric) -> Series | None:
    """Return a metric of a run; None if it was not logged or carries no information.

    An accuracy of 0 throughout carries none if rewards and task are both the user's own, since such rewards
    need not judge the task's answers. The tasks that come with QeRL have correct answers.
    """
    found = series(run.rows, metric.key)
    settings = run.settings or {}
    own = bool(settings.get("reward_files")) or any(key.startswith("judge.") for key in settings)
    ours = str(settings.get("task", "")).isidentifier()  # no FAMILY:NAME, no file
    if found and own and not ours and metric.key in ACCURACIES and not any(found.values):
        return None
    return found


def window(count: int) -> int:
    """Width of the smoothing window in points, odd: about a tenth of all."""
    return 2 * (count // 20) + 1


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return the centred moving mean over a window of an odd width in points; at the ends the window is cut
    off."""
    half = width // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
