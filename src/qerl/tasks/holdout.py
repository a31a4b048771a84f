"""Which problems are held out of data that comes without a test split.

Problems are ordered by a hash of their text, and the first in that order are held out. No random numbers are
drawn, so neither the order of the rows nor the seed of a run can move a problem into the other set, and two
copies of one problem are always in the same set.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

from qerl.errors import QeRLError
from qerl.seeding import derive_seed

_DRAWN_SHARE = 1 / 4
"""Share of all problems that is held out of a task that draws its own."""

Problem = TypeVar("Problem")


def holdout_rank(problem: str) -> float:
    """The place of a problem in the held-out order: uniform in [0, 1), and the same on every machine."""
    return derive_seed("held out", problem) / 2**63


def first_of_split(
    problems: Iterable[Problem], text: Callable[[Problem], str], split: str, count: int, of: str, remedy: str
) -> list[Problem]:
    """The first so many problems of the training split or of the held-out one, which has a quarter of all.

    Args:
        problems: All problems in the order in which they are drawn, each once.
        text: Gives the text that says where a problem belongs.
        split: "train" or "test".
        count: Problems that are wanted.
        of: What they are problems of.
        remedy: What to do where there are fewer.

    Raises:
        QeRLError: There are fewer.
    """
    own = (each for each in problems if (holdout_rank(text(each)) < _DRAWN_SHARE) == (split == "test"))
    drawn = list(itertools.islice(own, count))
    if len(drawn) < count:
        raise QeRLError(f"There are only {len(drawn)} {split} problems of {of}, not {count}; {remedy}.")
    return drawn
