"""Rows of the guessing game: a range to guess in, and the number hidden in it as the answer.

The environment of the same name (`qerl.environments.guess_number`) answers the guesses. Without it the task
is pure luck, with one guess per problem. The reward ``accuracy`` is 1 if the last guess was right, whatever
the number of turns.
"""

import random
from typing import Any

from qerl.errors import QeRLError
from qerl.tasks.answers import last_number
from qerl.tasks.drawn import DrawnTask, Set, first_of_split
from qerl.tasks.formats import AnswerFormat

_FORM = AnswerFormat(
    "guess",
    "Guess the number. Answer with one whole number and nothing else.",
    last_number,
    lambda text: text.strip().isdigit(),
)


class GuessNumber(DrawnTask):
    """Ranges from 1 to some number, with a number of that range as the answer.

    A problem is a range and a number. A quarter of the problems is held out, whatever the seed.

    Args:
        largest: Maximum end of a range, from 10 to 1000; every range ends with 10 or more.
        seed, train_size, test_size: As in :class:`DrawnTask`.
    """

    def __init__(
        self, largest: int = 100, seed: int = 0, train_size: int = 1024, test_size: int = 128
    ) -> None:
        super().__init__("guess_number", _FORM, seed, train_size, test_size)
        if not 10 <= largest <= 1000:
            raise QeRLError(f"largest is {largest}; it must be from 10 to 1000.")
        self.largest = largest

    def draw(self, split: Set, count: int) -> list[dict[str, Any]]:
        problems = [(end, number) for end in range(10, self.largest + 1) for number in range(1, end + 1)]
        random.Random(f"guess_number {split} {self.seed}").shuffle(problems)
        drawn = first_of_split(
            problems,
            lambda problem: f"{problem[1]} of {problem[0]}",
            split,
            count,
            of=f"guess_number up to {self.largest}",
            remedy="raise largest or ask for fewer",
        )
        return [
            {
                "prompt": self.prompt(f"I think of a whole number from 1 to {end}. What is it?"),
                "answer": str(number),
            }
            for end, number in drawn
        ]
