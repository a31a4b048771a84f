"""A curriculum by success rate: problems that are solved always or never are sampled less.

A group whose samples are all right, or all wrong, teaches nothing, and a problem that gave one is likely to
give another the next time (arXiv 2506.02177, section 3, finds so over epochs of three models; there prompts
are skipped by the number of their latest rollouts in a row without variance). Here a problem that was solved
always or never the last z times it was sampled is *settled*, and is sampled with the chance::

    max(curriculum_floor, 2 ** -z)

One sample that differs from the others sets z to 0. The floor keeps every problem in play, because the policy
moves: what it never solves today it may solve tomorrow, and what it always solves it may forget (arXiv
2601.02648 tests such problems again from time to time for this reason). New problems have z = 0.

The order of the data proposes the prompts of a rollout, as without a curriculum. Each keeps its place with
its chance; a place that becomes free goes to another problem of the data set, drawn in proportion to the
chances. Prompts that dynamic sampling adds are drawn so too. So an epoch stays as long as it was, and
proposes every problem once. All draws are keyed by (seed, step, ...), the counts z are those of all
processes and lie in the checkpoint: a resumed run samples the same prompts.

A problem is known by its row's content, so that a data set in another order, or with more rows, keeps what
was learned, and rows that are equal share it.

What was given up. The success rate is that of the latest group, not an estimate over several policies: with
few samples a problem of medium difficulty looks settled now and then, which the next sample with another
outcome mends. How hard a problem is within what is solved sometimes does not matter: sampling by the
distance from one half (arXiv 2510.01135) or by the rate of failure (arXiv 2501.12599) prefers some of them,
which needs rates that a group of eight does not give. Where tasks are mixed, places move from tasks that are
settled to those that are not: weights say what is proposed.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from qerl.seeding import generator
from qerl.trainer.dynamic_sampling import FreshPrompts

CURRICULUM_FILE = "curriculum.json"
"""In a checkpoint: how often each settled problem was so in a row."""

Row = dict[str, Any]


class Curriculum:
    """Which problems are due.

    Args:
        dataset: The training rows.
        floor: Smallest chance of a problem, above 0.
        seed: Seed of the run.
    """

    def __init__(self, dataset: Dataset, floor: float, seed: int) -> None:
        self._dataset, self._floor, self._seed = dataset, floor, seed
        self._settled: dict[str, int] = {}  # z by key, without zeros

    @cached_property
    def _keys(self) -> list[str]:
        return [key_of(row) for row in self._dataset]

    def _chance(self, key: str) -> float:
        return max(self._floor, 0.5 ** self._settled.get(key, 0))

    def chances(self) -> torch.Tensor:
        """The chance of each row of the data set [rows], fp64."""
        return torch.tensor([self._chance(key) for key in self._keys], dtype=torch.double)

    def choose(self, proposed: Sequence[Row], fresh: FreshPrompts, step: int, rollout: int) -> list[Row]:
        """The rows of a rollout: those that are due at their places, others in the places of the rest.

        Args:
            proposed: The rows of all processes, one for each group.
            fresh: Gives others; it knows of the proposed ones.
            step, rollout: Optimizer step, and number of the rollout within it; the same numbers choose the
                same rows.
        """
        draw = generator("curriculum", self._seed, step, rollout)
        uniforms = torch.rand(len(proposed), generator=draw, dtype=torch.double).tolist()
        due = [u < self._chance(key_of(row)) for u, row in zip(uniforms, proposed, strict=True)]
        places = due.count(False)
        others = iter(fresh.draw(places) if places else [])
        return [row if keeps else next(others) for row, keeps in zip(proposed, due, strict=True)]

    def observe(self, keys: Sequence[str], settled: Sequence[bool | None]) -> None:
        """Learn from the groups of a rollout of all processes.

        Args:
            keys: Of their rows, by `key_of`.
            settled: Whether a group's samples were all right or all wrong; None where none was judged.
        """
        for key, is_settled in zip(keys, settled, strict=True):
            if is_settled:
                self._settled[key] = self._settled.get(key, 0) + 1
            elif is_settled is not None:
                self._settled.pop(key, None)

    @property
    def settled(self) -> int:
        """Number of problems that were solved always or never when they were last sampled."""
        return len(self._settled)

    def save(self, folder: Path) -> None:
        """Write what was learned into a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CURRICULUM_FILE).write_text(json.dumps(self._settled), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on with what a checkpoint had learned; one that was made without a curriculum has nothing."""
        file = folder / CURRICULUM_FILE
        if file.is_file():
            self._settled = json.loads(file.read_text(encoding="utf-8"))


def key_of(row: Row) -> str:
    """By what a problem is known: a digest of its row's content."""
    content = json.dumps(row, sort_keys=True, default=str).encode()
    return blake2b(content, digest_size=8).hexdigest()


def settled_groups(verdict_B: torch.Tensor, group_size: int) -> list[bool | None]:
    """Whether each group's samples are all right or all wrong; None for a group that nobody judged.

    Args:
        verdict_B: Rewards of the judge, NaN where it gave none; above 0 is right.
        group_size: Samples in a group.
    """
    verdict_NG = verdict_B.view(-1, group_size)
    known_NG = ~verdict_NG.isnan()
    right_N = ((verdict_NG > 0) & known_NG).sum(dim=1)
    count_N = known_NG.sum(dim=1)
    return [
        None if not count else right in (0, count)
        for right, count in zip(right_N.tolist(), count_N.tolist(), strict=True)
    ]
