"""Problems of the package reasoning-gym (``task: reasoning_gym:NAME``): generators with own scorers.

A problem is generated from a number and the difficulty alone, so a row holds that number and its scorer finds
the rest again. Difficulty is set by options, which are the fields of the generator's configuration::

    task: reasoning_gym:chain_sum
    task_options: {min_terms: 2, max_terms: 3, min_digits: 2, max_digits: 2}

The reward ``accuracy`` is 1 where the generator's own score is 1; the score itself, which gives credit for a
part, is the reward ``score``. A quarter of the problems is held out, by their text, so training and held-out
problems are disjoint whatever the seed.

Nine scorers evaluate the answer as Python; they are given only what `qerl.tasks.evaluated` lets through.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from datasets import Dataset

from qerl.errors import QeRLError, first_line
from qerl.kernels.needs import how_to_install
from qerl.seeding import derive_seed
from qerl.tasks.base import Completion, Task, as_dataset
from qerl.tasks.evaluated import Kind, may_be_evaluated
from qerl.tasks.formats import get_format
from qerl.tasks.guard import RewardFunction, judges_alone
from qerl.tasks.holdout import holdout_rank

HELD_OUT_SHARE = 1 / 4

EVALUATED: dict[str, Kind] = {
    "binary_matrix": "literal",
    "n_queens": "literal",
    "spiral_matrix": "literal",
    "string_insertion": "literal",
    "countdown": "formula",
    "intermediate_integration": "formula",
    "polynomial_multiplication": "formula",
    "puzzle24": "formula",
    "simple_integration": "formula",
}
"""Generators of reasoning-gym 0.1.25 whose scorers evaluate the answer, and what an answer is."""

_RIGHT = 1 - 1e-6
"""Scores above this are the full one; some are sums of parts."""

_DRAWS_PER_PROBLEM = 20
"""So many problems are asked for at most, for each that is wanted; generators repeat themselves."""


class ReasoningGym(Task):
    """Problems of one generator.

    Args:
        generator: Its name in reasoning-gym, such as ``chain_sum``.
        seed: Seed from which the problems of both sets are drawn.
        train_size: Number of training problems.
        test_size: Number of held-out problems.
        difficulty: Fields of the generator's configuration.

    Raises:
        QeRLError: The package is missing, or it has no such generator, or the generator refuses its options.
    """

    def __init__(
        self,
        generator: str,
        seed: int = 0,
        train_size: int = 1024,
        test_size: int = 128,
        **difficulty: Any,
    ) -> None:
        super().__init__(f"reasoning_gym:{generator}", get_format("tags"))
        self.generator = generator
        self.train_size = train_size
        self.test_size = test_size
        most = _DRAWS_PER_PROBLEM * (train_size + test_size)
        # Generators add a problem's number to their seed, so near seeds would draw the same problems.
        apart = derive_seed("reasoning gym", seed) % 2**32
        self._problems = _make(generator, {"size": most, "seed": apart, **difficulty})

    def train(self) -> Dataset:
        """``train_size`` problems; see :meth:`Task.train`."""
        return self._rows("training", self.train_size)

    def test(self) -> Dataset:
        """``test_size`` problems that are not among the training problems; see :meth:`Task.test`."""
        return self._rows("held-out", self.test_size)

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """``accuracy`` (1 for the full score, else 0), ``format``, and ``score``, the generator's own.

        They are apart because wrong answers get credit too, often 0.01: what counts right answers (groups
        without signal, the curriculum, evaluation) would take them for right.
        """

        @judges_alone
        def score(
            prompts: list,  # noqa: ARG001
            completions: list[Completion],
            index: list[int],
            **_: Any,
        ) -> list[float | None]:
            return [self.score(self.extract(c), i) for c, i in zip(completions, index, strict=True)]

        @judges_alone
        def accuracy(
            prompts: list,  # noqa: ARG001
            completions: list[Completion],
            index: list[int],
            **_: Any,
        ) -> list[float | None]:
            given = zip(completions, index, strict=True)
            return [float(self.score(self.extract(c), i) > _RIGHT) for c, i in given]

        return [accuracy, *super().rewards[1:], score]

    def score(self, answer: str | None, index: int) -> float:
        """The generator's score of an answer to the problem of this number; 0 without an answer.

        Args:
            answer: As it was extracted.
            index: The row's column of that name.
        """
        kind = EVALUATED.get(self.generator)
        if answer is None or (kind is not None and not may_be_evaluated(answer, kind)):
            return 0.0
        return float(self._problems.score_answer(answer, self._problems[index]))

    def _rows(self, split: str, count: int) -> Dataset:
        rows = [
            {"prompt": self.prompt(question), "answer": answer, "index": index}
            for _, (index, question, answer) in zip(range(count), self._split(split), strict=False)
        ]
        if len(rows) < count:
            raise QeRLError(
                f"Only {len(rows)} different {split} problems of {self.name} were found at this difficulty, "
                f"not {count}; ask for fewer, or make it harder."
            )
        return as_dataset(rows, f"Task {self.name}, {split} set,")

    def _split(self, split: str) -> Iterator[tuple[int, str, str]]:
        """Number, question and answer of each different problem of a set."""
        seen: set[str] = set()
        for index in range(len(self._problems)):
            problem = self._problems[index]
            question = problem["question"]
            held_out = holdout_rank(question) < HELD_OUT_SHARE
            if held_out == (split == "held-out") and question not in seen:
                seen.add(question)
                yield index, question, problem["answer"] or ""  # some generators know no single answer


def _make(generator: str, options: dict[str, Any]) -> Any:
    """The generator with its options.

    Raises:
        QeRLError: See :class:`ReasoningGym`.
    """
    create, generators = _package()
    if generator not in generators:
        raise QeRLError(
            f"reasoning-gym has no generator {generator!r}; it has: {', '.join(sorted(generators))}."
        )
    known = [field.name for field in dataclasses.fields(generators[generator][1])]
    for option in options:
        if option not in known:
            raise QeRLError(
                f"Task reasoning_gym:{generator} has no option {option!r}; its options are system_prompt, "
                "answer_format, seed, train_size, test_size and "
                f"{', '.join(n for n in known if n not in ('seed', 'size'))}."
            )
    try:
        return create(generator, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise QeRLError(
            f"Task reasoning_gym:{generator} refuses its options: {first_line(error)}; mend task_options."
        ) from error


def _package() -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes a generator, and all generators with their configurations by name.

    Raises:
        QeRLError: The package is missing.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise QeRLError(
            "Tasks reasoning_gym:NAME need the package reasoning-gym; run "
            f"`{how_to_install('reasoning-gym')}`."
        ) from error
    return create_dataset, DATASETS
