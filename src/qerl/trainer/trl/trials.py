"""Microbatches that leave no trace in TRL's trainer. Tied to trl 1.16.

While it computes a loss, TRL counts microbatches, logs, adapts its entropy bonus, and asks accelerate whether
the optimizer's step ends here. Two things need a loss without that: a chunk of a microbatch that is not its
last one, and a step that is done again because memory ran out. Gradients are meant to stay in the first case
and are dropped by the caller in the second.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn
from trl import GRPOTrainer

_COUNTED_BY_TRL = ("_step", "entropy_coef", "_entropy_window_stats", "_last_world_entropy")


class Trials:
    """Keeps and puts back what a trainer counts, logs and controls over the microbatches of a step.

    Args:
        trainer: The trainer.
        own: Names of its attributes that are counted like TRL's own.
    """

    def __init__(self, trainer: GRPOTrainer, *own: str) -> None:
        self._trainer = trainer
        self._names = (*_COUNTED_BY_TRL, *own)
        self._at_step_start: dict[str, Any] = {}

    def start_step(self) -> None:
        """Remember the counts at the start of an optimizer step."""
        self._at_step_start = self._counts()

    def undo_step(self) -> None:
        """Put back the counts of the start of the step."""
        self._set_counts(self._at_step_start)

    @contextlib.contextmanager
    def no_trace(self, model: nn.Module) -> Iterator[None]:
        """A loss inside the block adds to this process's gradients; it logs nothing and counts nothing.

        Args:
            model: The policy as it is wrapped for several processes.
        """
        counts = self._counts()
        with self._trainer.accelerator.no_sync(model), self.ends_step(False), self.metrics_apart():
            yield
        self._set_counts(counts)

    @contextlib.contextmanager
    def ends_step(self, whether: bool) -> Iterator[None]:
        """Inside the block accelerate says whether the microbatch is the last of its optimizer step."""
        accelerator = self._trainer.accelerator
        before = accelerator.sync_gradients
        accelerator.gradient_state._set_sync_gradients(whether)
        try:
            yield
        finally:
            accelerator.gradient_state._set_sync_gradients(before)

    @contextlib.contextmanager
    def metrics_apart(self) -> Iterator[dict[str, list[float]]]:
        """Yields a mapping that collects what is logged inside the block; it goes nowhere else."""
        logged, apart = self._trainer._metrics["train"], defaultdict[str, list[float]](list)
        self._trainer._metrics["train"] = apart
        try:
            yield apart
        finally:
            self._trainer._metrics["train"] = logged

    def _counts(self) -> dict[str, Any]:
        return {name: getattr(self._trainer, name) for name in self._names}

    def _set_counts(self, counts: dict[str, Any]) -> None:
        for name, value in counts.items():
            setattr(self._trainer, name, value)
