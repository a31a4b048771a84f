"""Which metrics a report shows, and how their values are written."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl.

    Attributes:
        key: As logged.
        title: What readers call it.
        unit: Unit on the axis, empty for a pure number.
        better: Which end is the better one, None where neither is.
        share: Logged as a share of one, shown in per cent.
        smooth: Whether it is noisy; a schedule is drawn as the steps it consists of.
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


def number(value: float) -> str:
    """Three significant digits; from a thousand on a whole number in groups of three."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}".replace(",", "\N{THIN SPACE}")
    return f"{value:.3g}"
