"""A training step that runs out of GPU memory is done again from its start, in smaller pieces.

How much memory a step takes depends on how long its samples turned out, so a run may do well for hours and
then meet one batch that does not fit. What is sampled is kept; what is redone is the update: the gradients of
the step so far are dropped, since a backward pass that was cut off has left a part of its own in them, and
every microbatch of the step runs again with half as many samples a forward pass. The limit stays for the rest
of the run and goes into its checkpoints, so that a resumed run computes what this one would have.

The loss still sees a microbatch as a whole, so normalisers, importance weights and the logged means are those
of the undivided one: only the forward pass is cut. Each part is a checkpoint in autograd's sense (Chen et
al., arXiv 1604.06174): it keeps nothing but its log-probabilities and is computed again when the backward
pass reaches it, so that one part at a time is in memory, as in GradCache (Gao et al., arXiv 2101.06983). The
price is one forward pass more than with the right batch size from the start.

Given up: several processes. One that redoes its step would leave the others waiting in their all-reduce, so
there the error says what to change and ends the run. A redo draws new masks where LoRA has dropout.
"""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from qerl.errors import QeRLError

T = TypeVar("T")
B = TypeVar("B")

ROWS_FILE = "rows_per_forward"

logger = logging.getLogger(__name__)


class StepRedo:
    """Runs microbatches, and all of an optimizer step's again where memory ran out.

    Args:
        processes: Processes of the run; with more than one nothing is redone.

    Attributes:
        rows: Samples a forward pass may hold; None until memory has run out for the first time.
    """

    def __init__(self, processes: int = 1) -> None:
        self.rows: int | None = None
        self._processes = processes
        self._largest = 0  # rows in the largest forward pass since the last start of a microbatch
        self._step = -1
        self._batches: list = []

    def begins(self, step: int) -> bool:
        """Whether the next microbatch is the first of optimizer step ``step``; called once for each."""
        if step == self._step:
            return False
        self._step, self._batches = step, []
        return True

    def split(self, rows: list[int]) -> list[list[int]]:
        """The rows of a microbatch as parts that one forward pass each may hold, in order."""
        size = self.rows or max(len(rows), 1)
        parts = [rows[start : start + size] for start in range(0, len(rows), size)] or [rows]
        self._largest = max(self._largest, *map(len, parts))
        return parts

    def run(self, batch: B, microbatch: Callable[[B, bool], T], forget: Callable[[], None]) -> T:
        """Forward and backward of one more microbatch.

        Args:
            batch: Its tensors.
            microbatch: Runs a batch; the flag tells the newest from those that are done again. Its forward
                passes are cut by :meth:`split`.
            forget: Undoes what the microbatches of this step have done to gradients and counters.

        Returns:
            What ``microbatch`` returned for ``batch``.

        Raises:
            QeRLError: One sample alone does not fit, or there are several processes.
        """
        self._batches.append(batch)
        pending = [batch]
        while True:
            self._largest = 0
            try:
                results = [microbatch(one, one is batch) for one in pending]
                return results[-1]
            except torch.OutOfMemoryError as error:
                self._halve(error)
            # Only here, with the exception gone, do the frames of the failed attempt let go of their tensors.
            forget()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            pending = self._batches

    def save(self, folder: Path) -> None:
        """Leaves the limit in a checkpoint, if there is one."""
        if self.rows is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ROWS_FILE).write_text(f"{self.rows}\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Takes the limit of a checkpoint."""
        file = folder / ROWS_FILE
        self.rows = int(file.read_text(encoding="utf-8")) if file.is_file() else None

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        if self._processes > 1:
            raise QeRLError(
                "A training step ran out of GPU memory; with several processes it is not redone: lower "
                "per_device_train_batch_size or max_completion_length."
            ) from error
        if self._largest <= 1:
            raise QeRLError(
                "A training step ran out of GPU memory with a single sample in it; lower "
                "max_completion_length, set gradient_checkpointing: true or take a smaller lora_r."
            ) from error
        self.rows = (self._largest + 1) // 2
        logger.warning(
            "Out of GPU memory in step %d: it is redone from its start, from now on with at most %d of a "
            "microbatch's %d samples in one forward pass; per_device_train_batch_size: %d would avoid the "
            "extra forward pass this costs.",
            self._step + 1,
            self.rows,
            self._largest,
            self.rows,
        )


def sum_of_parts(
    forward: Callable[[list[int]], tuple[torch.Tensor, ...]], parts: list[list[int]]
) -> tuple[torch.Tensor, ...]:
    """Sums ``forward`` over parts of which at most one at a time keeps activations.

    Args:
        forward: Tensors of the same shapes for every part, zero outside of the part's rows.
        parts: At least one; a single one is run as it is.
    """
    if len(parts) == 1:
        return forward(parts[0])
    outputs = [checkpoint(forward, part, use_reentrant=False) for part in parts]
    return tuple(torch.stack(tensors).sum(dim=0) for tensors in zip(*outputs, strict=True))
