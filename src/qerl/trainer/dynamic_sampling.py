"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): no group without a gradient.

A group without signal (`qerl.trainer.advantages`) teaches nothing, and a group of a fresh prompt takes its
place. All groups of a step are numbered before any is sampled: first those that the order of the data
proposes, then the fresh ones, of which there are a bounded number. They are started in this order, in one
call of the engine that stays open (`qerl.trainer.rollout_step`): a further rollout for what is missing would
wait for the longest of its samples once more.

**Taken in order of start.** A step trains on the first groups, by number, that have a signal. A group that is
over is taken only once all before it are over as well: whoever took the first to end would prefer short
answers. So what a step trains on is the same whichever group ends first, and the same as if each had been
sampled after the one before; how many groups were started behind the last one that is taken does not matter,
and these are dropped. Where too few have a signal, groups without one keep their places, with advantages of
0.

**When one is started.** Groups run at the same time, so a further one is started before it is known to be
needed. Of j groups that are judged a have a signal, and as many further ones start as are missing if those
that run have one with probability (a + 4 s) / (j + 4). The share s is that of the step before, and 1 in the
first step; where every group has a signal none is sampled in vain. It is in the checkpoint, because which
samples decode together decides the last bits of their logits. In simulation (`python -m bench tail --dead
0.5`, steps of 7B on an H200, 16 groups of 8 wanted, half of all without signal, lengths lognormal with mean
400 of at most 1024) decoding takes 6.7 s and starts 40 groups, of which 32 are needed; with s = 1 7.6 s; 12.4
s where a group starts only once another has failed, 7.9 s where rows are always full, and 13.7 s where what
is missing is sampled in up to three further rollouts. No more samples run at a time than the step trains on,
for which memory is planned.

Which prompts are fresh depends on (seed, step, draws of the step before) alone, so a resumed run draws the
same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset

from qerl.seeding import generator

_WEIGHT = 4
"""Judged groups that the share of the step before weighs as much as."""


class Intake:
    """Which groups of an open call start, and which are taken. Plain arithmetic: it samples nothing.

    Args:
        wanted: Groups that the step trains on, the first of which are those that its data propose.
        most: Groups that may be started.
        share: Of groups that have a signal, as far as is known before.

    Attributes:
        wanted: As given.
        started: Groups that were started.
    """

    def __init__(self, wanted: int, most: int, share: float = 1.0) -> None:
        self.wanted, self._most, self._share = wanted, most, share
        self.started = 0
        self._alive: dict[int, bool] = {}  # of the groups that were judged

    def start(self, room: int) -> range:
        """The numbers of the groups to start now.

        Args:
            room: Groups that may run beside those that do.
        """
        judged, alive, begin = len(self._alive), sum(self._alive.values()), self.started
        chance = (alive + _WEIGHT * self._share) / (judged + _WEIGHT)
        while self.started - begin < room and self.started < self._most:
            if alive + (self.started - judged) * chance >= self.wanted:
                break
            self.started += 1
        return range(begin, self.started)

    def judge(self, group: int, alive: bool) -> None:
        """Note whether a group that is over has a signal."""
        self._alive[group] = alive

    def stop(self) -> None:
        """Take none but the proposed groups, whatever came of others."""
        self._most = self.wanted

    @property
    def has_judged_proposed(self) -> bool:
        """Whether all proposed groups are judged."""
        return all(group in self._alive for group in range(self.wanted))

    @property
    def last(self) -> int | None:
        """Number of groups up to the last one that is needed; None as long as that is not known."""
        alive = 0
        for group in range(self._most):
            if group not in self._alive:
                return None
            alive += self._alive[group]
            if alive == self.wanted:
                return group + 1
        return self._most

    def alive(self, group: int) -> bool:
        """Whether a group that was judged has a signal."""
        return self._alive[group]

    @property
    def share(self) -> float:
        """The share of groups with a signal among those up to the last that is needed."""
        assert self.last is not None
        return sum(self._alive[group] for group in range(self.last)) / self.last

    def places(self) -> list[int]:
        """The group that each place of the step's batch gets, once `last` is known.

        Proposed groups with a signal keep theirs, and the places of others are filled in order of start.
        """
        assert self.last is not None
        others = (group for group in range(self.wanted, self.last) if self._alive[group])
        return [group if self._alive[group] else next(others, group) for group in range(self.wanted)]


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
        count: How many to draw; where there are no more, rows in use follow, and then all again.
        coordinates: (seed, step, draw), the key of the draw.
        chances: Of each row, above 0; rows are drawn one after another in proportion to them.
    """
    order = _order(len(dataset), chances, generator("fresh", *coordinates))
    rows: list[dict[str, Any]] = []
    used: list[dict[str, Any]] = []
    for index in order:
        row = dataset[index]
        (used if prompt_of(row) in used_prompts else rows).append(row)
        if len(rows) == count:
            return rows
    pool = rows + used
    return [pool[i % len(pool)] for i in range(count)]


def _order(count: int, chances: torch.Tensor | None, draw: torch.Generator) -> list[int]:
    if chances is None:
        return torch.randperm(count, generator=draw).tolist()
    # The order of -log(u) / chance is that of draws without replacement (Efraimidis and Spirakis, 2006).
    waits = -torch.rand(count, generator=draw, dtype=torch.double).log() / chances
    return waits.argsort(stable=True).tolist()
