"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): no group without a gradient.

A group without signal (`qerl.trainer.advantages`) teaches nothing. It is replaced by a group of a fresh
prompt, for a bounded number of extra rollouts; what still has no signal then has advantages of 0. Which
prompts are fresh depends on (seed, step, draws of the step before) alone, so a resumed run draws the same.

Batches are those of `qerl.trainer.batch`, whole rollouts with the samples of a group side by side.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset

from qerl.seeding import generator
from qerl.trainer.batch import GROUP_KEY, PADDED_ON, Batch, group_index


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


def replace_groups(
    batch: Batch, targets: list[int], fresh: Batch, sources: list[int], group_size: int, pad: int
) -> Batch:
    """`batch` with the groups `targets` replaced by the groups `sources` of `fresh`.

    Args:
        batch, fresh: Batches with the same keys; their widths may differ.
        targets, sources: Group indices, pairwise.
        group_size: Samples in a group.
        pad: Pad token of the ids.

    Returns:
        A new batch of the first one's size. Scalars (TRL's token count) are the first one's and must be
        recomputed.
    """
    to = samples_of(targets, group_size)
    source = samples_of(sources, group_size)
    out = {}
    for key, old in batch.items():
        if old.ndim == 0:
            out[key] = old
            continue
        new = fresh[key]
        if key in PADDED_ON and old.ndim == 2:
            value = pad if key.endswith("_ids") else 0
            width = max(old.size(1), new.size(1))
            old, new = (_widen(t, width, PADDED_ON[key], value) for t in (old, new))
        out[key] = old.index_copy(0, to.to(old.device), new.index_select(0, source.to(new.device)))
    out[GROUP_KEY] = group_index(out, group_size)
    return out


def replace_log_rows(logs: dict[str, Any], fresh: dict[str, Any], rows: list[tuple[int, int]]) -> None:
    """Rows of TRL's table of completions become those of another rollout.

    Args:
        logs, fresh: TRL's `_logs`, columns in the order of the samples of all processes. A column that the
            other rollout does not have is filled with None.
        rows: (target, source) indices.
    """
    for name, column in logs.items():
        other = fresh.get(name, ())
        if isinstance(column, dict):
            replace_log_rows(column, other or {}, rows)
            continue
        for target, source in rows:
            if target < len(column):
                column[target] = other[source] if source < len(other) else None


def empty_log(logs: dict[str, Any]) -> dict[str, Any]:
    """A table with the columns of this one, without rows."""
    return {
        name: defaultdict[str, Any](column.default_factory)
        if isinstance(column, defaultdict)
        else deque[Any](maxlen=column.maxlen)
        for name, column in logs.items()
    }


def samples_of(groups: list[int], group_size: int) -> torch.Tensor:
    """Indices of the samples of these groups."""
    first = torch.tensor(groups, dtype=torch.long)[:, None] * group_size  # of no groups it would be float32
    return (first + torch.arange(group_size)).flatten()


def _widen(t: torch.Tensor, width: int, side: str, value: float) -> torch.Tensor:
    missing = width - t.size(1)
    amount = (missing, 0) if side == "left" else (0, missing)
    return torch.nn.functional.pad(t, amount, value=value)
