"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): no group without a gradient.

A group without signal (`qerl.trainer.advantages`) teaches nothing and is replaced by a group of a fresh
prompt. All groups of a step are numbered before any is sampled: first the groups that the order of the data
proposes, then a bounded number of fresh ones. They are started in this order, in one call of the engine that
stays open (`qerl.trainer.rollout_step`): a separate rollout for the missing groups would wait once more for
its longest sample.

**Taken in order of start.** A step trains on the first groups, by number, that have a signal. A finished
group is taken only once all groups before it have finished: taking groups in order of completion would prefer
short answers. So a step trains on the same groups whichever finishes first, and on the same as if each had
been sampled after the one before; groups started behind the last one taken are dropped, and their number does
not matter. If too few groups have a signal, groups without one keep their places, with advantages of 0.

**When a group is started.** Groups run at the same time, so a further group is started before it is known to
be needed. If a of j judged groups have a signal, each running group is assumed to have one with probability
(a + 4 s) / (j + 4), and as many further groups start as are then missing. The share s is measured in the step
before, and is 1 in the first step; if every group has a signal, none is sampled in vain. The checkpoint holds
s, because the last bits of logits depend on which samples decode together. In simulation (`python -m bench
tail --dead 0.5`, steps of 7B on an H200, 16 groups of 8 wanted, half of all groups without signal, lengths
lognormal with mean 400 and at most 1024) decoding takes 6.7 s and starts 40 groups, of which 32 are needed;
7.6 s with s = 1; 12.4 s if a group starts only once another has failed, 7.9 s if rows are always full, and
13.7 s if missing groups are sampled in up to three further rollouts. At most as many samples run at a time as
the step trains on, for which memory is planned.

Fresh prompts depend only on (seed, step, earlier draws of the step) and on a curriculum's probabilities, so a
resumed run draws the same prompts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset

from qerl.seeding import generator

_WEIGHT = 4
"""Weight of the previous step's share, in judged groups."""


class Intake:
    """The decision which groups of an open call start and which are taken; it samples nothing itself.

    Args:
        wanted: Number of groups that the step trains on; groups 0 to wanted - 1 are the proposed ones.
        most: Maximum number of groups to start.
        share: Expected share of groups with a signal.

    Attributes:
        wanted: As given.
        started: Number of groups started.
    """

    def __init__(self, wanted: int, most: int, share: float = 1.0) -> None:
        self.wanted, self._most, self._share = wanted, most, share
        self.started = 0
        self._alive: dict[int, bool] = {}  # of the groups that were judged

    def start(self, room: int) -> range:
        """Return the numbers of the groups to start now.

        Args:
            room: Maximum number of further groups that can run now.
        """
        judged, alive, begin = len(self._alive), sum(self._alive.values()), self.started
        chance = (alive + _WEIGHT * self._share) / (judged + _WEIGHT)
        while self.started - begin < room and self.started < self._most:
            if alive + (self.started - judged) * chance >= self.wanted:
                break
            self.started += 1
        return range(begin, self.started)

    def judge(self, group: int, alive: bool) -> None:
        """Record whether a finished group has a signal."""
        self._alive[group] = alive

    def stop(self) -> None:
        """Take only the proposed groups from now on."""
        self._most = self.wanted

    @property
    def has_judged_proposed(self) -> bool:
        """True if all proposed groups are judged."""
        return all(group in self._alive for group in range(self.wanted))

    @property
    def last(self) -> int | None:
        """Number of groups up to the last one needed; None until that is known."""
        alive = 0
        for group in range(self._most):
            if group not in self._alive:
                return None
            alive += self._alive[group]
            if alive == self.wanted:
                return group + 1
        return self._most

    def alive(self, group: int) -> bool:
        """Return True if a judged group has a signal."""
        return self._alive[group]

    @property
    def share(self) -> float:
        """Share of groups with a signal, among the groups up to the last one needed."""
        assert self.last is not None
        return sum(self._alive[group] for group in range(self.last)) / self.last

    def places(self) -> list[int]:
        """Return the group for each place of the step's batch, once `last` is known.

        Proposed groups with a signal keep their places; other places are filled in order of start.
        """
        assert self.last is not None
        others = (group for group in range(self.wanted, self.last) if self._alive[group])
        return [group if self._alive[group] else next(others, group) for group in range(self.wanted)]


class FreshPrompts:
    """Source of rows that the current optimizer step has not used yet; used rows follow when none are left.

    Args:
        dataset: Rows, usually with a column `prompt`.
        seed: Seed of the run.
        chances: Returns the weight of each row at the time of a draw; None draws uniformly.
    """

    def __init__(
        self, dataset: Dataset, seed: int, chances: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self._dataset, self._seed, self._chances = dataset, seed, chances
        self._step, self._draws = -1, 0
        self._used: list[Any] = []

    def note(self, step: int, prompts: Iterable[Any]) -> None:
        """Record that these prompts are sampled in optimizer step ``step``, on any process."""
        if step != self._step:
            self._step, self._draws, self._used = step, 0, []
        self._used += prompts

    def draw(self, count: int) -> list[dict[str, Any]]:
        """Return rows to sample in the step that was noted last; the same on every process."""
        key = (self._seed, self._step, self._draws)
        chances = self._chances() if self._chances is not None else None
        rows = fresh_rows(self._dataset, self._used, count, *key, chances=chances)
        self._draws += 1
        self.note(self._step, [prompt_of(row) for row in rows])
        return rows


def prompt_of(row: dict[str, Any]) -> Any:
    """Return the identity of a row: its prompt, or the whole row if an environment gives the prompt."""
    return row.get("prompt", row)


def fresh_rows(
    dataset: Dataset,
    used_prompts: list[Any],
    count: int,
    *coordinates: int,
    chances: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """Draw rows of the data set whose prompts are not in use yet.

    Args:
        dataset: Rows, usually with a column `prompt`.
        used_prompts: Prompts, as of `prompt_of`, to avoid.
        count: Number of rows to draw; if there are too few, rows in use follow, and then all rows again.
        coordinates: (seed, step, draw), the key of the draw.
        chances: Weight of each row, above 0; rows are drawn without replacement in proportion to it.
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
