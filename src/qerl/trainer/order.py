"""The order in which a trainer reads rows: each repeated per sample, and each rollout repeated per use.

A loader's batch is one process's part of a whole rollout, and transformers reads one batch per microbatch. So
the rows of a rollout come `repeats` times; the first copy is sampled, the others are ignored.

    rows 0 0 1 1 | 0 0 1 1 | 2 2 3 3 | 2 2 3 3     samples = 2, prompts = 2, repeats = 2

The order depends on (seed, epoch) alone: a resumed run reads the same data, and the rows of later rollouts
are known in advance.
"""

import copy
from collections.abc import Iterator, Sized
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import Sampler

from qerl.seeding import derive_seed


class RepeatedRows(Sampler[int]):
    """Sampler of row indices, repeated; prompts that do not fill a rollout are dropped.

    Args:
        rows: The data set.
        samples: Number of adjacent copies of each row.
        prompts: Number of distinct rows per rollout.
        repeats: Number of times that a rollout's rows come.
        seed: Seed of a new shuffle per epoch; None keeps the order of the data set.

    Attributes:
        epoch: The epoch whose order is iterated.
    """

    def __init__(
        self, rows: Sized, samples: int, prompts: int = 1, repeats: int = 1, seed: int | None = None
    ) -> None:
        self._count, self._samples, self._prompts, self._repeats = len(rows), samples, prompts, repeats
        self._seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._order(self.epoch)
        whole = range(0, self._count - self._prompts + 1, self._prompts)
        rollouts = [order[start : start + self._prompts] * self._repeats for start in whole]
        return iter([index for rollout in rollouts for index in rollout for _ in range(self._samples)])

    def of_rollout(self, number: int) -> list[int]:
        """Return the indices of rollout ``number``, counted from 0 over all epochs, repeated per sample."""
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
    """Return a stream with its rows repeated as in `RepeatedRows`, without shuffling; same arguments."""

    def repeat(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        whole = len(next(iter(batch.values()))) == prompts
        # Deep copies, so that a change to one sample's row leaves the others unchanged.
        return {
            name: [copy.deepcopy(value) for _ in range(repeats) for value in values for _ in range(samples)]
            if whole
            else []
            for name, values in batch.items()
        }

    return rows.map(repeat, batched=True, batch_size=prompts)
