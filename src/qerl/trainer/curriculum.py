"""A curriculum by success rate: problems that are always or never solved are sampled less.

A group whose samples are all right, or all wrong, teaches nothing, and the next group of the same problem is
likely to be such a group too (arXiv 2506.02177, section 3, finds so over epochs of three models; there
prompts are skipped by the number of their latest rollouts in a row without variance). Here a problem whose
last z groups were each all right or all wrong is *settled*, and is sampled with probability::

    max(curriculum_floor, 2 ** -z)

One sample that differs from the others sets z to 0. The floor keeps every problem in use, because the policy
changes: it may later solve a problem that it never solves now, and forget one that it always solves (arXiv
2601.02648 tests such problems again from time to time for this reason). New problems have z = 0.

The order of the data proposes the prompts of a rollout, as without a curriculum. Each prompt keeps its place
with its probability; a free place goes to another problem of the data set, drawn in proportion to these
probabilities, as are the prompts that dynamic sampling adds. So an epoch keeps its length, and proposes every
problem once. All draws are keyed by (seed, step, ...), and the counts z cover all processes and are stored in
the checkpoint: a resumed run samples the same prompts.

A problem is identified by its row's content, so that a data set in another order, or with more rows, keeps
its counts, and equal rows share one.

Given up. The success rate is that of the latest group, not an estimate over several policies: with few
samples a problem of medium difficulty looks settled now and then, until the next group with mixed outcomes.
The difficulty of problems that are sometimes solved does not matter: sampling by the distance from one half
(arXiv 2510.01135) or by the failure rate (arXiv 2501.12599) prefers some of them, which needs rates more
precise than a group of eight gives. In a mixture of tasks, places move from settled tasks to others: the
tasks' weights apply to the proposed prompts.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from qerl.seeding import generator, problem_key
from qerl.trainer.dynamic_sampling import FreshPrompts

CURRICULUM_FILE = "curriculum.json"
"""File in a checkpoint with z for each settled problem."""

Row = dict[str, Any]


class Curriculum:
    """The counts z of all problems, and the choice of prompts by them.

    Args:
        dataset: The training rows.
        floor: Lowest probability of a problem, above 0.
        seed: Seed of the run.
    """

    def __init__(self, dataset: Dataset, floor: float, seed: int) -> None:
        self._dataset, self._floor, self._seed = dataset, floor, seed
        self._settled: dict[str, int] = {}  # z by key, without zeros

    @cached_property
    def _keys(self) -> list[str]:
        return [problem_key(row) for row in self._dataset]

    def _chance(self, key: str) -> float:
        return max(self._floor, 0.5 ** self._settled.get(key, 0))

    def chances(self) -> torch.Tensor:
        """Return the probability of each row of the data set, [rows], fp64."""
        return torch.tensor([self._chance(key) for key in self._keys], dtype=torch.double)

    def choose(self, proposed: Sequence[Row], fresh: FreshPrompts, step: int, rollout: int) -> list[Row]:
        """Return the rows of a rollout: the proposed rows, some of them replaced at their places.

        Args:
            proposed: The rows of all processes, one per group.
            fresh: Draws replacements; the proposed prompts are already noted there.
            step, rollout: Optimizer step, and number of the rollout within it; the same numbers choose the
                same rows.
        """
        draw = generator("curriculum", self._seed, step, rollout)
        uniforms = torch.rand(len(proposed), generator=draw, dtype=torch.double).tolist()
        due = [u < self._chance(problem_key(row)) for u, row in zip(uniforms, proposed, strict=True)]
        places = due.count(False)
        others = iter(fresh.draw(places) if places else [])
        return [row if keeps else next(others) for row, keeps in zip(proposed, due, strict=True)]

    def observe(self, keys: Sequence[str], settled: Sequence[bool | None]) -> None:
        """Update the counts from the groups of a rollout of all processes.

        Args:
            keys: Keys of the groups' rows, by `qerl.seeding.problem_key`.
            settled: Whether a group's samples were all right or all wrong; None if none was judged.
        """
        for key, is_settled in zip(keys, settled, strict=True):
            if is_settled:
                self._settled[key] = self._settled.get(key, 0) + 1
            elif is_settled is not None:
                self._settled.pop(key, None)

    @property
    def settled(self) -> int:
        """Number of problems whose last judged group was all right or all wrong."""
        return len(self._settled)

    def save(self, folder: Path) -> None:
        """Write the counts into a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CURRICULUM_FILE).write_text(json.dumps(self._settled), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read a checkpoint's counts of problems in the data set; without a curriculum it has none."""
        file = folder / CURRICULUM_FILE
        if file.is_file():
            saved = json.loads(file.read_text(encoding="utf-8"))
            self._settled = {key: saved[key] for key in self._keys if key in saved}


def settled_groups(verdict_B: torch.Tensor, group_size: int) -> list[bool | None]:
    """Return, for each group, True if its judged samples are all right or all wrong; None if none was judged.

    Args:
        verdict_B: Rewards of the judge, NaN where it gave none; above 0 is right.
        group_size: Samples per group.
    """
    verdict_NG = verdict_B.view(-1, group_size)
    known_NG = ~verdict_NG.isnan()
    right_N = ((verdict_NG > 0) & known_NG).sum(dim=1)
    count_N = known_NG.sum(dim=1)
    return [
        None if not count else right in (0, count)
        for right, count in zip(right_N.tolist(), count_N.tolist(), strict=True)
    ]
