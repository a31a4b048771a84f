"""TRL's metrics of a loss, put together for all processes once a step. Tied to trl 1.16.

TRL's loss sums or gathers every one of its metrics over the processes and waits for the number: six meetings
and as many waits for the device in each loss of GRPO, so that a step takes the sum of the slowest losses
instead of the slowest sum. Here TRL computes what it would send, and is told a number that nobody reads. What
it would have sent stays on the device until the step ends; then all metrics of all losses of the step travel
in one message, and are what TRL would have logged.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from trl import GRPOTrainer

from qerl.errors import QeRLError

_Kind = Literal["mean", "min", "max"]

_GATHERED: dict[str, _Kind] = {
    "policy_loss": "mean",
    "clip_ratio/low_min": "min",
    "clip_ratio/high_max": "max",
}
"""What TRL makes of the numbers that it gathers."""


@dataclass(frozen=True)
class LateMetric:
    """Stands among the numbers of a metric until `settle` puts one in its place.

    Attributes:
        parts: What this process knows, float32: sum and count [2] of a mean; or one extreme [1], which is
            infinite where nothing is known.
        kind: What the processes' parts make together.
        of_nothing: The mean where the processes count nothing.
    """

    parts: torch.Tensor
    kind: _Kind
    of_nothing: float = 0.0

    @classmethod
    def mean_of(cls, values: torch.Tensor, mask: torch.Tensor) -> "LateMetric":
        """The mean over what the masks of all processes hold; NaN, which no log has, if that is nothing."""
        totals = torch.stack([(values * mask).sum().float(), mask.sum().float()])
        return cls(totals.detach(), "mean", of_nothing=math.nan)

    def value(self, parts_Rn: torch.Tensor) -> float:
        """The number, given the parts of all R processes, on the CPU."""
        if self.kind == "mean":
            total, count = parts_Rn.sum(dim=0)
            return (total / count).item() if count else self.of_nothing
        extreme = (parts_Rn.amin() if self.kind == "min" else parts_Rn.amax()).item()
        return extreme if math.isfinite(extreme) else math.nan


@contextlib.contextmanager
def metrics_later(trainer: GRPOTrainer) -> Iterator[None]:
    """Inside the block, one call of TRL's loss, processes do not meet; its metrics become `LateMetric`s.

    TRL sends each metric right before it logs it, so the two are matched by their order.
    """
    accelerator, logged = trainer.accelerator, trainer._metrics["train"]
    sent: list[LateMetric | torch.Tensor] = []  # sums and counts, or numbers that TRL would have gathered

    def reduce(totals: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        sent.append(LateMetric(totals.detach().float(), "mean"))
        return torch.ones(2)

    def gather(values: torch.Tensor) -> torch.Tensor:
        sent.append(values.detach().float())
        return torch.zeros(1)

    apart = defaultdict[str, list[float]](list)
    trainer._metrics["train"] = apart
    replaced = {"reduce": reduce, "gather": gather}
    try:
        vars(accelerator).update(replaced)
        yield
    finally:
        for name in replaced:
            del vars(accelerator)[name]
        trainer._metrics["train"] = logged
    if "entropy_coef" in apart:  # known to all
        logged["entropy_coef"] += apart.pop("entropy_coef")
    for name, metric in zip(apart, sent, strict=True):
        logged[name].append(metric if isinstance(metric, LateMetric) else _gathered(metric, name))


def _gathered(numbers: torch.Tensor, name: str) -> LateMetric:
    """What TRL makes of the numbers that it gathers, NaN left out, by the name of the metric: their mean, the
    smallest or the largest.

    Raises:
        QeRLError: What TRL makes of this metric is not known.
    """
    kind = _GATHERED.get(name)
    if kind is None:
        raise QeRLError(
            f"TRL's loss gathers a metric named {name!r}, and whether processes log its mean, least or "
            "largest number is not known; install the version of trl that this version of qerl pins."
        )
    unknown = numbers.isnan()
    if kind == "mean":
        known = numbers.where(~unknown, 0.0), (~unknown).float()
        return LateMetric(torch.stack([part.sum() for part in known]), kind, of_nothing=math.nan)
    numbers = numbers.where(~unknown, math.inf if kind == "min" else -math.inf)
    return LateMetric((numbers.amin() if kind == "min" else numbers.amax())[None], kind)


def settle(metrics: Mapping[str, list[Any]], accelerator: Accelerator) -> None:
    """Put numbers in the place of late metrics; every process must call this, with as many of each.

    Args:
        metrics: Lists of numbers and late metrics by name.
        accelerator: Of the run.
    """
    places = [
        (values, at)
        for _, values in sorted(metrics.items())
        for at, value in enumerate(values)
        if isinstance(value, LateMetric)
    ]
    late: list[LateMetric] = [values[at] for values, at in places]
    if not late:
        return
    own = torch.cat([metric.parts for metric in late])
    parts_R = accelerator.gather(own[None]).cpu().split([len(metric.parts) for metric in late], dim=1)
    for (values, at), metric, parts_Rn in zip(places, late, parts_R, strict=True):
        values[at] = metric.value(parts_Rn)
