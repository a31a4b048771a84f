"""The order in which a trainer reads rows: each as often as it is sampled, and each rollout as often as it is
used.

A loader's batch is one process's part of a whole rollout, of which transformers asks for a batch once per
microbatch. So a rollout's rows come `repeats` times, the first of them sampled and the others passed over.

    rows 0 0 1 1 | 0 0 1 1 | 2 2 3 3 | 2 2 3 3     samples = 2, prompts = 2, repeats = 2

The order depends on (seed, epoch) alone: a resumed run meets the same data, and what later rollouts read is
known ahead of them.
"""

import copy
from collections.abc import Iterator, Sized
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import Sampler

from qerl.seeding import derive_seed


class RepeatedRows(Sampler[int]):
    """Indices of a data set; prompts that do not fill a rollout are left out.

    Args:
        rows: The data set.
        samples: How often each row stands side by side.
        prompts: Rows of a rollout.
        repeats: How often a rollout's rows come.
        seed: By which rows are shuffled anew for each epoch; None keeps their order.

    Attributes:
        epoch: The epoch whose order is given.
    """

    def __init__(
        self, rows: Sized, samples: int, prompts: int = 1, repeats: int = 1, seed: int | None = None
    ) -> None:
        self._count, self._samples, self._prompts, self._repeats = len(rows), samples, prompts, repeats
        self._seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._order(self.epoch)
        whole = range(0, self._count - self._prompts + 1, self._prompts)
        rollouts = [order[start : start + self._prompts] * self._repeats for start in whole]
        return iter([index for rollout in rollouts for index in rollout for _ in range(self._samples)])

    def of_rollout(self, number: int) -> list[int]:
        """The indices of a rollout, counted over all epochs from 0, each as often as it is sampled."""
        epoch, place = divmod(number, self._count // self._prompts)
        start = place * self._prompts
        return [
            index for index in self._order(epoch)[start : start + self._prompts] for _ in range(self._samples)
        ]

    def _order(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(self._count))
        draw = torch.Generator().manual_seed(derive_seed("order", self._seed, epoch))
        return torch.randperm(self._count, generator=draw).tolist()

    def __len__(self) -> int:
        return self._count // self._prompts * self._prompts * self._samples * self._repeats


def repeated_stream(
    rows: IterableDataset, samples: int, prompts: int = 1, repeats: int = 1
) -> IterableDataset:
    """The rows of a stream in the order of `RepeatedRows` without shuffling; arguments are the same."""

    def repeat(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        whole = len(next(iter(batch.values()))) == prompts
        # Copies, so that what is done to one sample's row leaves the others'.
        return {
            name: [copy.deepcopy(value) for _ in range(repeats) for value in values for _ in range(samples)]
            if whole
            else []
            for name, values in batch.items()
        }

    return rows.map(repeat, batched=True, batch_size=prompts)
