"""Arithmetic word problems made on the spot: a task that needs no download and that a small model can learn.

A problem is a short story with one or two operations on small whole numbers; no result on the way is below 1.
Worked examples come before it as chat turns, because a small model that is told the format but shown no
example earns no reward at all, and without a reward there is nothing to learn from. The answer asked for is
the calculation, a line for each step, then ``####`` and the result::

    9 + 4 = 13
    #### 13

Train, held-out and example problems cannot overlap, whatever their seeds. The story's plot and its numbers
together are the problem's key, and a hash of the key alone decides which of the three sets it belongs to.
Other names or things do not make another key, so no held-out problem is a training problem in disguise.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from datasets import Dataset

from qerl.errors import QeRLError
from qerl.tasks.base import Task, as_dataset

Operation = Literal["+", "-", "*"]
Split = Literal["train", "test", "examples"]
_OPERATIONS: tuple[Operation, ...] = ("+", "-", "*")


@dataclass(frozen=True)
class Level:
    """How hard the problems are: the numbers of steps that occur, and the largest number a story mentions."""

    steps: tuple[int, ...]
    largest: int


LEVELS = {
    "wp1": Level((1,), 9),
    "wp12": Level((1, 2), 9),
    "wp2": Level((2,), 9),
    "wp1-99": Level((1,), 99),
    "wp12-99": Level((1, 2), 99),
    "wp2-99": Level((2,), 99),
}

_LARGEST_FACTOR = 12  # products stay within the tables that people know by heart, also at the larger levels

# {n} person, {t} thing, {a} the story's first number, {b} the number of the step. A sum or difference is a
# change to what the opening states; a product is an opening with both of its numbers, and only ever the first
# step.
_NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lucy", "Max", "Emma", "Leo", "Nora", "Jack", "Ella")
_THINGS = ("apples", "books", "pens", "coins", "cards", "shells", "stamps", "balls", "cookies", "stickers")
_OPENING = "{n} has {a} {t}."
_SENTENCES: dict[Operation, tuple[str, ...]] = {
    "+": (
        "{n} gets {b} more {t}.",
        "{n} buys {b} more {t}.",
        "{n} finds {b} more {t}.",
        "A friend gives {n} {b} more {t}.",
    ),
    "-": (
        "{n} loses {b} {t}.",
        "{n} gives away {b} {t}.",
        "{n} sells {b} {t}.",
        "A friend takes {b} of the {t}.",
    ),
    "*": (
        "{n} has {a} boxes with {b} {t} in each box.",
        "{n} fills {a} bags with {b} {t} each.",
        "{n} buys {a} packs of {b} {t}.",
        "Each of {a} friends gives {n} {b} {t}.",
    ),
}
_QUESTION = "How many {t} does {n} have now?"
_APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class Problem:
    """A word problem.

    Attributes:
        key: Plot and numbers; problems with one key differ in names and things alone.
        question: The story and its question.
        lines: The calculation, one line a step, as "9 + 4 = 13".
        answer: The result.
    """

    key: str
    question: str
    lines: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """The full answer that the prompt's examples show."""
        return "\n".join([*self.lines, f"#### {self.answer}"])


def split_of(key: str) -> Split:
    """The set that a problem belongs to, from its key alone: 1/32 examples, 7/32 held out, the rest train."""
    bucket = hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % 32
    if bucket == 0:
        return "examples"
    return "test" if bucket < 8 else "train"


def make_problem(rng: random.Random, level: Level, operation: Operation | None = None) -> Problem:
    """Draw a problem.

    Args:
        rng: Random numbers; consumed.
        level: Steps and range of numbers.
        operation: The first step's operation; drawn as well if None.
    """
    steps = rng.choice(level.steps)
    op = rng.choice(_OPERATIONS) if operation is None else operation
    largest_first = min(level.largest, _LARGEST_FACTOR) if op == "*" else level.largest
    first = value = rng.randint(3 if op == "-" else 2, largest_first)
    plot = [] if op == "*" else [(_OPENING, first)]
    lines = []
    for _ in range(steps):
        b = _operand(rng, op, value, level.largest)
        plot.append((rng.choice(_SENTENCES[op]), b))
        result = _APPLY[op](value, b)
        lines.append(f"{value} {op} {b} = {result}")
        value = result
        op = rng.choice(("+", "-")) if value > 2 else "+"
    words = {"n": rng.choice(_NAMES), "t": rng.choice(_THINGS)}
    sentences = [sentence.format(a=first, b=b, **words) for sentence, b in plot]
    return Problem(
        key="|".join(sentence.format(a=first, b=b, n="", t="") for sentence, b in plot),
        question=" ".join([*sentences, _QUESTION.format(**words)]),
        lines=tuple(lines),
        answer=value,
    )


def _operand(rng: random.Random, op: Operation, value: int, largest: int) -> int:
    if op == "*":
        return rng.randint(2, min(largest, _LARGEST_FACTOR))
    if op == "-":
        return rng.randint(2, min(largest, value - 1))
    return rng.randint(2, largest)


def draw_problems(
    split: Split, level: Level, count: int, seed: int, operations: Sequence[Operation] = ()
) -> list[Problem]:
    """Problems of one set, no question twice.

    Args:
        split: The set to draw from.
        level: Steps and range of numbers.
        count: How many.
        seed: Same seed, same problems.
        operations: First operations, taken in turn; drawn if there are none.

    Raises:
        QeRLError: The level does not have that many.
    """
    rng = random.Random(f"arithmetic {split} {level} {seed}")
    drawn: dict[str, Problem] = {}
    for _ in range(1000 + 200 * count):
        if len(drawn) == count:
            return list(drawn.values())
        problem = make_problem(rng, level, operations[len(drawn) % len(operations)] if operations else None)
        if split_of(problem.key) == split:
            drawn.setdefault(problem.question, problem)
    raise QeRLError(
        f"Only {len(drawn)} of {count} arithmetic {split} problems were found at this level; ask for fewer, "
        "or choose another level."
    )


class Arithmetic(Task):
    """Procedural word problems of one level.

    Args:
        level: One of ``LEVELS``: ``wp1`` one step, ``wp12`` one or two, ``wp2`` two, with numbers to 9; with
            ``-99`` appended, to 99.
        examples: Worked examples before each question, at least 0. The same for all seeds, so that runs
            compare.
        seed: Draws the problems of both sets.
        train_size: Training problems.
        test_size: Held-out problems.
    """

    def __init__(
        self,
        level: str = "wp1",
        examples: int = 1,
        seed: int = 0,
        train_size: int = 4096,
        test_size: int = 256,
    ) -> None:
        super().__init__("arithmetic", "hashes")
        if level not in LEVELS:
            raise QeRLError(f"Arithmetic level {level!r} is unknown; use one of: {', '.join(LEVELS)}.")
        if examples < 0:
            raise QeRLError(f"examples is {examples}; it must be 0 or more.")
        self.level = LEVELS[level]
        self.seed = seed
        self.train_size = train_size
        self.test_size = test_size
        shown = draw_problems("examples", self.level, examples, 0, operations=_OPERATIONS)
        self.worked = [(problem.question, problem.solution) for problem in shown]

    def train(self) -> Dataset:
        """``train_size`` problems; see :meth:`Task.train`."""
        return self._rows("train", self.train_size)

    def test(self) -> Dataset:
        """``test_size`` problems, none of which shares plot and numbers with a training problem."""
        return self._rows("test", self.test_size)

    def _rows(self, split: Split, count: int) -> Dataset:
        drawn = draw_problems(split, self.level, count, self.seed)
        rows = ({"prompt": self.prompt(p.question, self.worked), "answer": str(p.answer)} for p in drawn)
        return as_dataset(rows, f"Task arithmetic, {split} set,")
