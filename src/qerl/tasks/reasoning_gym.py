"""Problems of the package reasoning-gym (``task: reasoning_gym:NAME``): generators with own scorers.

A problem is generated from a number and the difficulty alone, so a row holds that number and its scorer finds
the rest again. Difficulty is set by options, which are the fields of the generator's configuration::

    task: reasoning_gym:chain_sum
    task_options: {min_terms: 2, max_terms: 3, min_digits: 2, max_digits: 2}

The reward ``accuracy`` is 1 where the generator's own score is 1; the score itself, which gives partial
credit, is the reward ``score``. A quarter of the problems is held out, by their text, so training and
held-out problems are disjoint whatever the seed.

Nine scorers evaluate the answer as Python; they are given only answers that pass `qerl.tasks.evaluated`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from qerl.errors import QeRLError, first_line
from qerl.kernels.needs import how_to_install
from qerl.rewards.text import Completion
from qerl.seeding import derive_seed
from qerl.tasks.drawn import DrawnTask, Set, first_of_split
from qerl.tasks.evaluated import Kind, may_be_evaluated
from qerl.tasks.formats import get_format
from qerl.tasks.guard import RewardFunction, judges_alone

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
"""Largest number of drawn problems for each wanted one; generators repeat themselves."""


class ReasoningGym(DrawnTask):
    """Problems of one generator.

    Args:
        generator: Its name in reasoning-gym, such as ``chain_sum``.
        seed, train_size, test_size: As in :class:`DrawnTask`.
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
        super().__init__(f"reasoning_gym:{generator}", get_format("tags"), seed, train_size, test_size)
        self.generator = generator
        maximum = _DRAWS_PER_PROBLEM * (train_size + test_size)
        # Generators add a problem's number to their seed, so near seeds would draw the same problems.
        apart = derive_seed("reasoning gym", seed) % 2**32
        self._problems = _make(generator, {"size": maximum, "seed": apart, **difficulty})

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """``accuracy`` (1 for the full score, else 0), ``format``, and ``score``, the generator's own.

        They are apart because wrong answers get credit too, often 0.01, and would be counted as right
        (zero-advantage groups, the curriculum, evaluation).
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
        """The generator's score of an extracted answer to the problem of this ``index``; 0 without an
        answer."""
        kind = EVALUATED.get(self.generator)
        if answer is None or (kind is not None and not may_be_evaluated(answer, kind)):
            return 0.0
        return float(self._problems.score_answer(answer, self._problems[index]))

    def draw(self, split: Set, count: int) -> list[dict[str, Any]]:
        drawn = first_of_split(
            self._different(),
            lambda problem: problem[1],
            split,
            count,
            of=f"{self.name} at this difficulty",
            remedy="ask for fewer, or make it harder",
        )
        return [
            {"prompt": self.prompt(question), "answer": answer, "index": index}
            for index, question, answer in drawn
        ]

    def _different(self) -> Iterator[tuple[int, str, str]]:
        """Number, question and answer of each problem whose question was not asked before."""
        seen: set[str] = set()
        for index in range(len(self._problems)):
            problem = self._problems[index]
            question = problem["question"]
            if question not in seen:
                seen.add(question)
                yield index, question, problem["answer"] or ""  # some generators know no single answer


def _make(generator: str, options: dict[str, Any]) -> Any:
    """The generator with its options."""
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
            f"Task reasoning_gym:{generator} refuses its options: {first_line(error)}; fix task_options."
        ) from error


def _package() -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that makes a generator, and all generators with their configurations by name."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise QeRLError(
            "Tasks reasoning_gym:NAME need the package reasoning-gym; run "
            f"`{how_to_install('reasoning-gym')}`."
        ) from error
    return create_dataset, DATASETS
