"""The testbed's problems as a task: which cell is asked, and the reward of an answer.

The problems are those of the model that `python -m lab testbed` trains; other models do not know this
language.
"""

import itertools
import random
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

from lab.testbed.language import ASKED, ENDS, LENGTHS, NODES, ON, PRIORS, STOP, habit, question, right
from qerl.errors import QeRLError
from qerl.rewards.text import Completion
from qerl.tasks.drawn import DrawnTask, Set, first_of_split
from qerl.tasks.formats import AnswerFormat
from qerl.tasks.guard import RewardFunction, judges_alone

FOR_HABIT = 0.3
"""Deceptive reward of the habit's answer; the right answer earns 1, all others nothing."""

Problem = tuple[tuple[tuple[int, int], ...], tuple[int, ...]]
"""Arrows in the order of the prompt, and the nodes to begin at."""

_FORM = re.compile(f"[{ENDS}]+|[{ENDS}](?:{re.escape(ON)}[{ENDS}])*{re.escape(STOP)}")


class Testbed(DrawnTask):
    """Problems of one kind, length and prior.

    A quarter of the problems is held out, whatever the seed.

    Args:
        kind: `chain` or `lock`.
        length: Arrows of a chain, 2 to 5, or letters of a lock, 3 to 6.
        prior: Chance of a right answer before training: 0.1, 0.01 or 0.001.
        reward: `sparse`, 1 for the right answer and nothing else; for a chain also `deceptive`, which pays
            for the habit too.
        seed: Seed from which the problems of both sets are drawn.
        train_size: Number of training problems.
        test_size: Number of held-out problems.
    """

    def __init__(
        self,
        kind: str = "chain",
        length: int = 4,
        prior: float = 0.01,
        reward: Literal["sparse", "deceptive"] = "sparse",
        seed: int = 0,
        train_size: int = 4096,
        test_size: int = 256,
    ) -> None:
        if kind not in LENGTHS:
            raise QeRLError(f"kind is {kind!r}; use one of: {', '.join(LENGTHS)}.")
        if length not in LENGTHS[kind]:
            lengths = ", ".join(map(str, LENGTHS[kind]))
            raise QeRLError(f"length is {length!r}; for a {kind} use one of: {lengths}.")
        self.cell = (kind, length, prior)
        if self.cell not in ASKED:
            known = ", ".join(f"{p:g}" for p in PRIORS.values() if (kind, length, p) in ASKED)
            raise QeRLError(f"prior is {prior!r}; for a {kind} of length {length} use one of: {known}.")
        if reward not in ("sparse", "deceptive") or (reward == "deceptive" and kind != "chain"):
            raise QeRLError(f"reward is {reward!r}; use sparse, or deceptive for a chain.")
        form = AnswerFormat("letters", "", _answer, lambda text: _answer(text) is not None)
        super().__init__("testbed", form, seed, train_size, test_size)
        self.reward = reward

    def ask(self, system_prompt: str | None = None, answer_format: str | None = None) -> None:
        """Raise, since a problem of this language has one form.

        Raises:
            QeRLError: Always.
        """
        raise QeRLError(
            "Task testbed has its own language, without system_prompt and answer_format; remove them."
        )

    def same(self, answer: str, reference: str) -> bool:
        """True for the right answer, to the letter."""
        return answer == reference

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """``accuracy`` (0 or 1); with the deceptive reward also ``habit`` (0 or 0.3). There is none for the
        form, which nearly every answer has."""

        @judges_alone
        def habit(
            prompts: list,  # noqa: ARG001
            completions: list[Completion],
            habit: list[str],
            **_: Any,
        ) -> list[float | None]:
            return [
                FOR_HABIT * (self.extract(completion) == own)
                for completion, own in zip(completions, habit, strict=True)
            ]

        accuracy = super().rewards[:1]
        return [*accuracy, habit] if self.reward == "deceptive" else accuracy

    def draw(self, split: Set, count: int) -> list[dict[str, Any]]:
        """See :meth:`DrawnTask.draw`."""
        drawn = first_of_split(_problems(f"{split} {self.seed}", self.cell), str, split, count,
                               of="testbed", remedy="ask for fewer")  # fmt: skip
        return [
            {
                "prompt": self.prompt(question(self.cell, *problem)),
                "answer": right(self.cell, *problem),
                "habit": habit(self.cell, *problem),
            }
            for problem in drawn
        ]


def _problems(key: str, cell: tuple[str, int, float]) -> Iterator[Problem]:
    """Yield problems without end, each once."""
    rng, seen = random.Random(f"testbed {key}"), set()
    kind, length, _ = cell
    for _ in itertools.count():
        circle = rng.sample(range(NODES), NODES)
        arrows = [(start, circle[(at + 1) % NODES]) for at, start in enumerate(circle)]
        begin = tuple(rng.randrange(NODES) for _ in range(length if kind == "lock" else 1))
        problem = (tuple(rng.sample(arrows, NODES)), begin)
        if problem not in seen:
            seen.add(problem)
            yield problem


def _answer(text: str) -> str | None:
    return text.strip() if _FORM.fullmatch(text.strip()) else None
