"""Metrics of TRL's loss that are read once per optimizer step. Tied to trl 1.16.

TRL's loss asks for some ten numbers with `.item()`, each of which waits until the GPU has done all that was
asked of it; meanwhile it gets nothing new to do. Inside `kept_on_device` such a number stays a scalar on the
device, which TRL puts into its lists of metrics like any other, and `fetch` reads them all at once.

The adaptive entropy bonus computes with its number on the host, so that loss is left as it is.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from trl.trainer import grpo_trainer

Number = float | torch.Tensor


class _ItemIsScalar(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def kept_on_device() -> Iterator[None]:
    """Inside the block `.item()` gives a scalar tensor, and TRL's extremes without NaN ask nothing."""
    before = grpo_trainer.nanmin, grpo_trainer.nanmax
    grpo_trainer.nanmin, grpo_trainer.nanmax = _lowest, _highest
    try:
        with _ItemIsScalar():
            yield
    finally:
        grpo_trainer.nanmin, grpo_trainer.nanmax = before


def fetch(metrics: Mapping[str, list[Number]]) -> None:
    """Put numbers in the place of scalars that are still on the device; one wait for all."""
    late = [
        (values, i, x)
        for values in metrics.values()
        for i, x in enumerate(values)
        if isinstance(x, torch.Tensor)
    ]
    if late:
        numbers = torch.stack([scalar.double() for _, _, scalar in late]).tolist()
        for (values, i, _), number in zip(late, numbers, strict=True):
            values[i] = number


def _highest(values: torch.Tensor) -> torch.Tensor:
    """The largest value that is not NaN; NaN where all are."""
    nan = values.isnan()
    return torch.where(nan.all(), torch.nan, values.masked_fill(nan, -torch.inf).max())


def _lowest(values: torch.Tensor) -> torch.Tensor:
    return -_highest(-values)
