"""Generated arithmetic word problems: a task that needs no download and that a small model can learn.

A problem is a short story with one or two operations on small whole numbers; every intermediate result is at
least 1. Worked examples come before it as chat turns, because a small model that is told the format but shown
no example earns no reward at all, and without a reward there is nothing to learn from. The answer asked for
is the calculation, one line per operation, then ``####`` and the result::

    9 + 4 = 13
    #### 13

The training, held-out and example problems cannot overlap, whatever their seeds. The plot of the story
together with its numbers is the problem's key, and a hash of the key alone decides to which of the three sets
the problem belongs. Different names or things do not change the key, so no held-out problem is a training
problem in disguise.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from datasets import Dataset

from qerl.errors import QeRLError
from qerl.tasks.base import assistant_says
from qerl.tasks.drawn import DrawnTask, Set
from qerl.tasks.formats import get_format

Operation = Literal["+", "-", "*"]
Split = Literal["train", "test", "examples"]
_OPERATIONS: tuple[Operation, ...] = ("+", "-", "*")


@dataclass(frozen=True)
class Level:
    """Difficulty of problems.

    Attributes:
        steps: Numbers of operations.
        largest: The largest number that a story mentions.
        factor: The largest factor of a product; by default within the tables that people know by heart.
    """

    steps: tuple[int, ...]
    largest: int
    factor: int = field(default=12, repr=False)  # the representation seeds the drawing of problems


LEVELS = {
    "wp1": Level((1,), 9),
    "wp12": Level((1, 2), 9),
    "wp2": Level((2,), 9),
    "wp1-99": Level((1,), 99),
    "wp12-99": Level((1, 2), 99),
    "wp2-99": Level((2,), 99),
    "wp1-99x99": Level((1,), 99, 99),
}

# {n} person, {t} thing, {a} the story's first number, {b} the number that the operation adds. A sum or a
# difference changes what the opening states; a product is itself the opening, with both of its numbers, so it
# can only be the first operation.
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
_CALCULATOR = "Use the calculator: write the calculation. Then write #### and the answer."
_QUESTION = "How many {t} does {n} have now?"
_APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class Problem:
    """A word problem.

    Attributes:
        key: The plot and the numbers; problems with the same key differ only in names and things.
        question: The story and its question.
        lines: The calculation, one line per operation, such as "9 + 4 = 13".
        answer: The result.
    """

    key: str
    question: str
    lines: tuple[str, ...]
    answer: int

    def session(self, whole: bool) -> list[tuple[str, str]]:
        """The turns with the environment ``calculator``, as pairs of a user's and an assistant's message.

        Args:
            whole: True for all turns up to the answer, False for the first calculation alone. Only one of
                several examples in a prompt is whole: shown more often, a small model begins its first turn
                with the answer's ``####`` instead of a calculation.
        """
        calculations = [line.split(" = ") for line in self.lines]
        said = [self.question, *(result for _, result in calculations)]
        written = [*(f"{expression} =" for expression, _ in calculations), f"#### {self.answer}"]
        return list(zip(said, written, strict=True))[: None if whole else 1]


def split_of(key: str) -> Split:
    """The set of the problem with this key: 1/32 examples, 7/32 held out, the rest training."""
    bucket = hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % 32
    if bucket == 0:
        return "examples"
    return "test" if bucket < 8 else "train"


def make_problem(rng: random.Random, level: Level, operation: Operation | None = None) -> Problem:
    """Draw a problem with ``rng``, which is advanced.

    Args:
        rng: The source of random numbers.
        level: The number of operations and the range of numbers.
        operation: The first operation; None draws it too.
    """
    steps = rng.choice(level.steps)
    op = rng.choice(_OPERATIONS) if operation is None else operation
    largest_first = min(level.largest, level.factor) if op == "*" else level.largest
    first = value = rng.randint(3 if op == "-" else 2, largest_first)
    plot = [] if op == "*" else [(_OPENING, first)]
    lines = []
    for _ in range(steps):
        b = _operand(rng, op, value, level)
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


def _operand(rng: random.Random, op: Operation, value: int, level: Level) -> int:
    if op == "*":
        return rng.randint(2, min(level.largest, level.factor))
    if op == "-":
        return rng.randint(2, min(level.largest, value - 1))
    return rng.randint(2, level.largest)


def draw_problems(
    split: Split, level: Level, count: int, seed: int, operations: Sequence[Operation] = ()
) -> list[Problem]:
    """Draw problems of one set, each question at most once.

    Args:
        split: The set to draw from.
        level: The number of operations and the range of numbers.
        count: Number of problems.
        seed: The same seed draws the same problems.
        operations: First operations of the problems, used in rotation; if empty, they are drawn.

    Raises:
        QeRLError: The level does not have this number of problems.
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


class Arithmetic(DrawnTask):
    """Generated word problems of one level. The column ``steps`` of a row is its number of operations.

    Args:
        level: One of :data:`LEVELS`: ``wp1`` one operation, ``wp12`` one or two, ``wp2`` two, with numbers up
            to 9, or up to 99 with ``-99`` appended. Factors are at most 12, in ``wp1-99x99`` at most 99.
        examples: Number of worked examples before each question, the same for all seeds, so that runs can be
            compared.
        calculator: True for problems with the environment ``calculator``: the instruction asks for the
            calculation, and worked examples leave the result to the environment.
        seed, train_size, test_size: As in :class:`DrawnTask`.
    """

    strata = "steps"

    def __init__(
        self,
        level: str = "wp1",
        examples: int = 1,
        calculator: bool = False,
        seed: int = 0,
        train_size: int = 4096,
        test_size: int = 256,
    ) -> None:
        hashes = get_format("hashes")
        form = replace(hashes, instruction=_CALCULATOR) if calculator else hashes
        super().__init__("arithmetic", form, seed, train_size, test_size)
        if level not in LEVELS:
            raise QeRLError(f"Arithmetic level {level!r} is unknown; use one of: {', '.join(LEVELS)}.")
        if examples < 0:
            raise QeRLError(f"examples is {examples}; it must be 0 or more.")
        self.level = LEVELS[level]
        self.calculator = calculator
        self.examples = draw_problems("examples", self.level, examples, 0, operations=_OPERATIONS)

    def ask(self, system_prompt: str | None = None, answer_format: str | None = None) -> None:
        """See :meth:`Task.ask`; with ``calculator``, the answer format cannot be changed.

        Raises:
            QeRLError: Also if an answer format is given with ``calculator``.
        """
        if self.calculator and answer_format is not None:
            raise QeRLError(
                "Task arithmetic with calculator: true has an answer format of its own; remove answer_format."
            )
        super().ask(system_prompt, answer_format)

    def solution(self, problem: Problem) -> str:
        """The full answer to a problem in the required form, as worked examples show it."""
        return self.format.write("\n".join(problem.lines), str(problem.answer))

    @property
    def worked(self) -> list[tuple[str, str]]:
        """The worked examples before each question, as pairs of a user's and an assistant's message."""
        if not self.calculator:
            return [(problem.question, self.solution(problem)) for problem in self.examples]
        return [turn for number, p in enumerate(self.examples) for turn in p.session(whole=number == 0)]

    def demonstrations(self, held_out: bool = False) -> Dataset:
        """Problems with their calculations; see :meth:`Task.demonstrations`."""
        if self.calculator:  # the environment writes the results
            return super().demonstrations(held_out)
        rows = self.test() if held_out else self.train()
        drawn = draw_problems("test" if held_out else "train", self.level, len(rows), self.seed)
        solved = map(self.solution, drawn)
        return rows.add_column("completion", list(map(assistant_says, solved)))

    def draw(self, split: Set, count: int) -> list[dict[str, Any]]:
        """Rows of one set, none of which shares plot and numbers with a row of the other."""
        drawn = draw_problems(split, self.level, count, self.seed)
        worked = self.worked
        return [
            {
                "prompt": self.prompt(p.question, worked),
                "answer": str(p.answer),
                "steps": len(p.lines),
            }
            for p in drawn
        ]
