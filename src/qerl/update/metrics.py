"""Numbers that a loss reports, put together for all processes once a step.

A loss leaves what it reports on the device, and meets no other process: each number that is read there waits
for the device, and each meeting for the slowest process. So a loss reports a `Metric`, and `gathered` makes
numbers of those of all losses of a step, of which all travel in one message.

Legend: R processes, n parts of a metric.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Metric:
    """What one process knows of a number that one loss reports.

    Attributes:
        parts: Float32 on the device: sum and count [2] of a mean; else a sum, or an extreme that is infinite
            where nothing is known [1].
        kind: What the parts of all processes make together.
        of_nothing: The mean where the processes count nothing.
    """

    parts: torch.Tensor
    kind: Literal["mean", "sum", "least", "largest"]
    of_nothing: float = 0.0

    @classmethod
    def mean(cls, values: torch.Tensor, counted: torch.Tensor, of_nothing: float = 0.0) -> "Metric":
        """The mean over what is counted, 0 or 1 in the shape of the values."""
        total = torch.where(counted.bool(), values, 0.0).sum()
        return cls(torch.stack([total.detach().float(), counted.sum().float()]), "mean", of_nothing)

    @classmethod
    def sum(cls, values: torch.Tensor) -> "Metric":
        """The sum of values."""
        return cls(values.detach().sum().float()[None], "sum")

    @classmethod
    def least(cls, values: torch.Tensor) -> "Metric":
        """The least value that is not NaN."""
        return cls(values.detach().float().nan_to_num(math.inf, math.inf, -math.inf).amin()[None], "least")

    @classmethod
    def largest(cls, values: torch.Tensor) -> "Metric":
        """The largest value that is not NaN."""
        return cls(values.detach().float().nan_to_num(-math.inf, math.inf, -math.inf).amax()[None], "largest")

    def value(self, parts_Rn: torch.Tensor) -> float:
        """The number, given the parts of all processes, on the CPU; NaN for an extreme of nothing."""
        if self.kind == "mean":
            total, count = parts_Rn.sum(dim=0).tolist()
            return total / count if count else self.of_nothing
        if self.kind == "sum":
            return parts_Rn.sum().item()
        extreme = (parts_Rn.amin() if self.kind == "least" else parts_Rn.amax()).item()
        return extreme if math.isfinite(extreme) else math.nan


Metrics = Mapping[str, Metric]
"""What a loss reports, by name."""


def gathered(
    losses: Sequence[Metrics], gather: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, list[float]]:
    """The numbers of some losses by name, one for each loss that reports it.

    Args:
        losses: Those of this process; the others have as many, which report the same.
        gather: From this process's [1, n] to [R, n] of all, as accelerate's.
    """
    reported = [(name, metric) for loss in losses for name, metric in loss.items()]
    found = defaultdict[str, list[float]](list)
    if reported:
        own = torch.cat([metric.parts for _, metric in reported])
        sizes = [len(metric.parts) for _, metric in reported]
        parts_R = gather(own[None]).cpu().split(sizes, dim=1)
        for (name, metric), parts_Rn in zip(reported, parts_R, strict=True):
            found[name].append(metric.value(parts_Rn))
    return found
