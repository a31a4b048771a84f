"""The microbatches of a rollout: what the update asks of them on the CPU, and which of them a step has."""

from collections.abc import Callable, Sequence

import torch

from qerl.trainer.batch import Batch, on_host, padded
from qerl.update.chunks import Outputs
from qerl.update.padded import PaddedBatch
from qerl.update.spans import Spans


class Microbatches:
    """Microbatches of the rollout in use.

    Their copies on the CPU are made together, when the update of a rollout begins: one wait for the device
    instead of some for each loss.
    """

    def __init__(self) -> None:
        self._parts: Sequence[Batch] = ()
        self._copies: list[Batch] = []
        self._step = range(0)
        self._end = 0
        self._spans: Spans | None = None

    def know(self, parts: Sequence[Batch]) -> None:
        """Copy the microbatches of a rollout, unless they are known."""
        if parts is not self._parts:
            self._parts, self._copies, self._step = parts, [on_host(part) for part in parts], range(0)
            self.forget_passes()

    def start_step(self, first: int, count: int) -> None:
        """Begin an optimizer step with so many microbatches, as far as they are of this rollout."""
        self._end = first + count
        self._step = range(first, min(self._end, len(self._parts)))
        self.forget_passes()

    def forget_passes(self) -> None:
        """Drop forward passes of the step that were shared, with their graphs."""
        self._spans = None

    def copy_of(self, batch: Batch) -> Batch:
        """What the update asks of a batch on the CPU; no wait for microbatches of the rollout."""
        number = self._number(batch)
        return on_host(batch) if number is None else self._copies[number]

    def shared_outputs(
        self,
        batch: Batch,
        max_tokens: int,
        rows_of: Callable[[Batch], list[int]],
        forward: Callable[[PaddedBatch, list[int], bool], Outputs],
    ) -> Outputs | None:
        """Outputs of a microbatch from a pass that it shares with others of the step (`qerl.update.spans`).

        Args:
            batch: The microbatch.
            max_tokens: Largest number of tokens in a pass.
            rows_of: Samples of a microbatch that are to be computed, by its copy.
            forward: Computes samples of a batch; the flag says whether the step ends with its backward pass.

        Returns:
            None where the microbatch is to be computed by itself.
        """
        number = self._number(batch)
        if number is None or number not in self._step:
            return None
        if self._spans is None:
            copies = [self._copies[each] for each in self._step]
            whole = _side_by_side([padded(copy) for copy in copies])
            samples = len(copies[0]["advantages"])
            rows = [[i * samples + row for row in rows_of(copy)] for i, copy in enumerate(copies)]
            first, end = self._step.start, self._end
            self._spans = Spans(
                rows, samples, whole.lengths,
                lambda rows, last: forward(whole, rows, first + last + 1 == end),
            )  # fmt: skip
        return self._spans.outputs(number - self._step.start, max_tokens)

    def end(self, batch: Batch) -> None:
        """Run a shared pass backward if this was the last of its microbatches; their losses are through."""
        number = self._number(batch)
        if self._spans is not None and number is not None:
            self._spans.end(number - self._step.start)

    def _number(self, batch: Batch) -> int | None:
        return next((number for number, part in enumerate(self._parts) if part is batch), None)


def _side_by_side(batches: list[PaddedBatch]) -> PaddedBatch:
    """Batches of one rollout, which are padded alike, as one."""
    return PaddedBatch(
        torch.cat([batch.prompt_ids_BP for batch in batches]),
        torch.cat([batch.prompt_mask_BP for batch in batches]),
        torch.cat([batch.completion_ids_BC for batch in batches]),
        torch.cat([batch.completion_mask_BC for batch in batches]),
        torch.cat([batch.group_B for batch in batches]),
    )
