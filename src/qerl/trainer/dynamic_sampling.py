"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): no group without a gradient.

A group without signal (`qerl.trainer.advantages`) teaches nothing. It is replaced by a group of a fresh
prompt, for a bounded number of extra rollouts; what still has no signal then has advantages of 0. Which
prompts are fresh depends on (seed, step, draws of the step before) alone, so a resumed run draws the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset

from qerl.seeding import generator


class FreshPrompts:
    """Rows of a data set that an optimizer step has not used yet, as far as there are any.

    Args:
        dataset: Rows, most with a column `prompt`.
        seed: Seed of the run.
        chances: Gives the chance of each row at the time of a draw; None draws all alike.
    """

    def __init__(
        self, dataset: Dataset, seed: int, chances: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._dataset, self._seed, self._chances = dataset, seed, chances
        self._step, self._draws = -1, 0
        self._used: list[Any] = []

    def note(self, step: int, prompts: Iterable[Any]) -> None:
        """Note that these prompts are sampled in optimizer step ``step``, on whichever process."""
        if step != self._step:
            self._step, self._draws, self._used = step, 0, []
        self._used += prompts

    def draw(self, count: int) -> list[dict[str, Any]]:
        """Rows to sample in the step noted last; the same on every process."""
        key = (self._seed, self._step, self._draws)
        chances = self._chances() if self._chances is not None else None
        rows = fresh_rows(self._dataset, self._used, count, *key, chances=chances)
        self._draws += 1
        self.note(self._step, [prompt_of(row) for row in rows])
        return rows


def prompt_of(row: dict[str, Any]) -> Any:
    """What tells a row from others: its prompt, or all of it where an environment gives the prompt."""
    return row.get("prompt", row)


def fresh_rows(
    dataset: Dataset,
    used_prompts: list[Any],
    count: int,
    *coordinates: int,
    chances: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """Rows of the data set whose prompts are not in use, as long as there are any.

    Args:
        dataset: Rows with a column `prompt`.
        used_prompts: Prompts that are not wanted again.
        count: How many to draw; a small data set may repeat rows.
        coordinates: (seed, step, draw), the key of the draw.
        chances: Of each row, above 0; rows are drawn one after another in proportion to them.
    """
    order = _order(len(dataset), chances, generator("fresh", *coordinates))
    rows: list[dict[str, Any]] = []
    for index in order:
        row = dataset[index]
        if prompt_of(row) not in used_prompts:
            rows.append(row)
        if len(rows) == count:
            return rows
    pool = rows or [dataset[index] for index in order]
    return [pool[i % len(pool)] for i in range(count)]


def _order(count: int, chances: torch.Tensor | None, draw: torch.Generator) -> list[int]:
    if chances is None:
        return torch.randperm(count, generator=draw).tolist()
    # The order of -log(u) / chance is that of draws without replacement (Efraimidis and Spirakis, 2006).
    waits = -torch.rand(count, generator=draw, dtype=torch.double).log() / chances
    return waits.argsort(stable=True).tolist()
