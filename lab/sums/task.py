"""Task of sums of two small numbers, in the format of the policy of `lab.sums.policy`."""

import itertools
import random
import re
from typing import Any

from lab.sums.policy import BELOW, answer, question
from qerl.tasks.drawn import DrawnTask, Set, first_of_split
from qerl.tasks.formats import AnswerFormat

_SUMS = list(itertools.product(range(BELOW), repeat=2))
_THREE_DIGITS = re.compile(r"\d{3}")


class Sums(DrawnTask):
    """Sums, a fixed quarter of which is held out, whatever the seed.

    Args:
        seed: Seed from which the sums of both sets are drawn.
        train_size: Number of training sums.
        test_size: Number of held-out sums.
    """

    def __init__(self, seed: int = 0, train_size: int = 4096, test_size: int = 512) -> None:
        form = AnswerFormat("digits", "", _digits, lambda text: _digits(text) is not None)
        super().__init__("sums", form, seed, train_size, test_size)

    def same(self, answer: str, reference: str) -> bool:
        """Return True if the digits are right."""
        return answer == reference

    def draw(self, split: Set, count: int) -> list[dict[str, Any]]:
        """See :meth:`DrawnTask.draw`."""
        order = random.Random(f"sums {split} {self.seed}").sample(_SUMS, len(_SUMS))
        drawn = first_of_split(order, str, split, count, of="sums", remedy="ask for fewer")
        return [{"prompt": self.prompt(question(*numbers)), "answer": answer(*numbers)} for numbers in drawn]


def _digits(text: str) -> str | None:
    return text.strip() if _THREE_DIGITS.fullmatch(text.strip()) else None
