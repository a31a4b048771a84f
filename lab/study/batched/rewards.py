"""Tokenised problems, and the task's rewards for completions.

Small models soon write the same few answers to a problem, and runs with one seed share their problems, so
each text is decoded and judged once. Problems are cached with their task, because the batches of a study
share them, and rendering some thousand prompts takes as long as many steps.

Early in a run most texts are new, and a tenth of them state an answer that only math-verify can judge, in
milliseconds each: for thousands of texts per step this takes longer than all else. Large numbers of texts are
therefore judged by subprocesses, which know the task because they are forked from this process.
"""

import ctypes
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.models.chat import Chat
from qerl.tasks.base import Task
from qerl.tasks.guard import RewardFunction
from qerl.tasks.together import guarded

_MOST_TEXTS = 1_000_000
"""Number of cached texts, some 0.3 GB, above which the cache is cleared."""

_BESIDE = 128
"""Number of texts below which this process judges alone."""

_MOST_PROCESSES = 8


class Problems:
    """Rows of a task, tokenised, with the rewards of their completions.

    Args:
        task: The task whose rewards judge.
        rows: Rows of the task.
        tokenizer: Renders prompts and reads completions.

    Attributes:
        rows: The rows.
        ids: Token ids of each prompt.
        reward_names: Names of the rewards.

    Raises:
        QeRLError: A reward compares the samples of a batch, which are not judged together here.
    """

    def __init__(
        self, task: Task, rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        chat = Chat(tokenizer)
        task.opening = chat.opening
        self.rows = rows
        self.ids = [chat.ids(row["prompt"]) for row in self.rows]
        self._tokenizer = tokenizer
        for reward in task.rewards:
            if not getattr(reward, "judges_alone", False):
                raise QeRLError(
                    f"The reward {reward.__name__} of task {task.name} does not judge each completion by "
                    "itself (qerl.tasks.guard.judges_alone), which a study needs."
                )
        self._rewards = [guarded(_together(reward)) for reward in task.rewards]
        self.reward_names = [reward.__name__ for reward in self._rewards]
        self._known: dict[tuple[int, tuple[int, ...]], tuple[str, list[float]]] = {}
        self._judges = Judges(self, _cores() // 2)

    def rewards_of(self, problems: Sequence[int], texts: Sequence[str]) -> list[list[float]]:
        """Rewards of each text by each function, NaN where a function gives none; in this process."""
        rows = [self.rows[problem] for problem in problems]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        prompts = [row["prompt"] for row in rows]
        each = [reward(prompts, list(texts), **columns) for reward in self._rewards]
        return [
            [math.nan if value is None else value for value in of_text] for of_text in zip(*each, strict=True)
        ]

    def judge(self, problems: Sequence[int], completions: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rewards [B, F] of completions, fp32 on the CPU; NaN where a reward was not given.

        Args:
            problems: Index of the problem that each completion answers.
            completions: Token ids.
        """
        keys = self._learn(problems, completions)
        return torch.tensor([self._known[key][1] for key in keys])

    def texts(self, problems: Sequence[int], completions: Sequence[Sequence[int]]) -> list[str]:
        """The text of each completion."""
        return [self._known[key][0] for key in self._learn(problems, completions)]

    def _learn(
        self, problems: Sequence[int], completions: Sequence[Sequence[int]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        keys = [(problem, tuple(ids)) for problem, ids in zip(problems, completions, strict=True)]
        if len(self._known) > _MOST_TEXTS:
            self._known.clear()
        fresh = [key for key in dict.fromkeys(keys) if key not in self._known]
        if fresh:
            texts = self._tokenizer.batch_decode([list(ids) for _, ids in fresh], skip_special_tokens=True)
            rewards = self._judges([problem for problem, _ in fresh], texts)
            for key, text, values in zip(fresh, texts, rewards, strict=True):
                self._known[key] = text, values
        return keys


def _together(reward: RewardFunction) -> RewardFunction:
    """The same function without its mark `judges_alone`, so that thousands of texts have one time limit.

    Setting a limit per text takes as long as judging it. If the common limit is exceeded or a text fails, the
    guard still judges the texts one by one.
    """

    def together(*args: Any, **columns: Any) -> list[float | None]:
        return reward(*args, **columns)

    together.__name__ = reward.__name__
    return together


def training_problems(task: Task, tokenizer: PreTrainedTokenizerBase) -> Problems:
    """The training problems of a task, cached for its next batch."""
    return _kept(task, None, tokenizer)


def held_out_problems(task: Task, rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> Problems:
    """Any problems of a task, cached for the next call with the same rows."""
    return _kept(task, json.dumps(list(rows)), tokenizer)


@lru_cache(maxsize=8)
def _kept(task: Task, rows: str | None, tokenizer: PreTrainedTokenizerBase) -> Problems:
    return Problems(task, list(task.epoch(task.train())) if rows is None else json.loads(rows), tokenizer)


class Judges:
    """Subprocesses that judge texts, started by the first call with many texts.

    Args:
        problems: The problems whose rewards judge.
        processes: Number of subprocesses; below 2 for none.
    """

    def __init__(self, problems: Problems, processes: int) -> None:
        self._problems = problems
        self._processes = min(processes, _MOST_PROCESSES) if sys.platform == "linux" else 0
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, problems: list[int], texts: list[str]) -> list[list[float]]:
        """As `Problems.rewards_of`."""
        if self._processes < 2 or len(texts) < _BESIDE:
            return self._problems.rewards_of(problems, texts)
        if self._pool is None:
            _OF[id(self._problems)] = self._problems
            # An executor rather than a Pool, which waits forever for a process that was killed.
            fork = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self._processes, fork, _start)
        size = math.ceil(len(texts) / (4 * self._processes))
        judge = partial(_judge_apart, id(self._problems))
        starts = range(0, len(texts), size)
        found = self._pool.map(
            judge, [problems[at : at + size] for at in starts], [texts[at : at + size] for at in starts]
        )
        try:
            return list(chain.from_iterable(found))
        except BrokenProcessPool:
            self._pool = None  # the next batch starts processes of its own
            raise


_OF: dict[int, Problems] = {}
"""Problems with which forked processes judge, by a key that each call names."""


def _start() -> None:
    """Set up a judging process: it ignores Ctrl-C, which its parent handles, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; an orphan would hold the GPU's memory


def _judge_apart(key: int, problems: list[int], texts: list[str]) -> list[list[float]]:
    return _OF[key].rewards_of(problems, texts)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
