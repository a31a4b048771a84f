"""Tasks that draw their own problems, with disjoint training and held-out sets."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from datasets import Dataset

from qerl.errors import QeRLError
from qerl.tasks.base import Task, as_dataset, holdout_rank
from qerl.tasks.formats import AnswerFormat

Set = Literal["train", "test"]
Problem = TypeVar("Problem")

_HELD_OUT_SHARE = 1 / 4
_WORDS = {"train": "training", "test": "held-out"}


class DrawnTask(Task):
    """A task whose problems are drawn by a subclass, in given numbers.

    Args:
        name: The name by which recipes know the task.
        answer_format: The form in which an answer is to be stated.
        seed: Seed of the problems of both sets.
        train_size, test_size: Numbers of training and of held-out problems.
    """

    def __init__(
        self, name: str, answer_format: AnswerFormat, seed: int, train_size: int, test_size: int
    ) -> None:
        super().__init__(name, answer_format)
        self.seed = seed
        self.train_size = train_size
        self.test_size = test_size

    @abstractmethod
    def draw(self, split: Set, count: int) -> Iterable[Mapping[str, Any]]:
        """Draw ``count`` rows of one set, none of whose problems is in the other set.

        Raises:
            QeRLError: There are fewer than ``count`` problems.
        """

    def train(self) -> Dataset:
        """``train_size`` problems; see :meth:`Task.train`."""
        return self._drawn("train", self.train_size)

    def test(self) -> Dataset:
        """``test_size`` problems that are not among the training problems; see :meth:`Task.test`."""
        return self._drawn("test", self.test_size)

    def _drawn(self, split: Set, count: int) -> Dataset:
        return as_dataset(self.draw(split, count), f"Task {self.name}, {_WORDS[split]} set,")


def first_of_split(
    problems: Iterable[Problem], text: Callable[[Problem], str], split: Set, count: int, of: str, remedy: str
) -> list[Problem]:
    """Return the first ``count`` problems of one set; a quarter of all problems is held out.

    Args:
        problems: All problems in the order in which they are drawn, each once.
        text: Gives the text by which a problem is assigned to a set.
        split: The set.
        count: Number of problems.
        of, remedy: For the error: the source of the problems, and advice.

    Raises:
        QeRLError: There are fewer than ``count`` problems in the set.
    """
    own = (each for each in problems if (holdout_rank(text(each)) < _HELD_OUT_SHARE) == (split == "test"))
    drawn = list(itertools.islice(own, count))
    if len(drawn) < count:
        raise QeRLError(
            f"There are only {len(drawn)} {_WORDS[split]} problems of {of}, not {count}; {remedy}."
        )
    return drawn
