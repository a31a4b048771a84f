"""A needle in a haystack: one right walk among many, whose probability is known before anything is learned.

The problems are those of the model ``needle`` (`lab.needle.folder`), which is trained here in half a minute
and answers with the right walk with the probability that the prompt names. So the time that a way of
exploring takes to find the first success, and to learn it, can be compared with theory. Other models do not
know this language.
"""

import itertools
import random
import re
from typing import Any

from lab.needle.language import COUNTS, DOORS, KEYS, NOTHING, PLACES, PRIORS, RIGHT, question, walk
from qerl.errors import QeRLError
from qerl.tasks.drawn import DrawnTask, Set, first_of_split
from qerl.tasks.formats import AnswerFormat

# The key and the three words of the place.
_PROBLEMS = ["".join(words) for words in itertools.product(KEYS, PLACES, PLACES, PLACES)]


class Needle(DrawnTask):
    """Problems of one prior and one number of decisions.

    A problem is a key and a place. A quarter of the problems is held out, whatever the seed.

    Args:
        prior: Probability with which the untrained policy succeeds; 0.1, 0.03, 0.01 or 0.003.
        decisions: Doors to choose, 1 to 3, that share this probability equally.
        seed: Seed from which the problems of both sets are drawn.
        train_size: Number of training problems.
        test_size: Number of held-out problems.
    """

    def __init__(
        self,
        prior: float = 0.1,
        decisions: int = 1,
        seed: int = 0,
        train_size: int = 4096,
        test_size: int = 256,
    ) -> None:
        if prior not in PRIORS.values():
            raise QeRLError(f"prior is {prior!r}; use one of: {', '.join(map(str, PRIORS.values()))}.")
        if decisions not in range(1, len(COUNTS) + 1):
            raise QeRLError(f"decisions is {decisions!r}; use a number from 1 to {len(COUNTS)}.")
        super().__init__("needle", _walks(decisions), seed, train_size, test_size)
        self.prior = prior
        self.decisions = decisions

    def ask(self, system_prompt: str | None = None, answer_format: str | None = None) -> None:
        """Raise, since a problem of this language has one form.

        Raises:
            QeRLError: Always.
        """
        raise QeRLError(
            "Task needle has its own language, without system_prompt and answer_format; remove them."
        )

    def same(self, answer: str, reference: str) -> bool:
        """True for the right walk, to the letter."""
        return answer == reference

    def draw(self, split: Set, count: int) -> list[dict[str, Any]]:
        """See :meth:`DrawnTask.draw`."""
        order = random.Random(f"needle {split} {self.seed}").sample(range(len(_PROBLEMS)), len(_PROBLEMS))
        problems = (_PROBLEMS[i] for i in order)
        drawn = first_of_split(problems, str, split, count, of="needle", remedy="ask for fewer")
        return [
            {
                "prompt": self.prompt(question(self.prior, self.decisions, problem[0], problem[1:])),
                "answer": walk(RIGHT[: self.decisions], problem[0]),
            }
            for problem in drawn
        ]


def _walks(decisions: int) -> AnswerFormat:
    """Format of completions that are a walk of `decisions` decisions; nothing in the prompt asks for it."""
    form = re.compile(f"(?:[{DOORS}][{NOTHING}{KEYS}]){{{decisions}}}")

    def extract(text: str) -> str | None:
        return text.strip() if form.fullmatch(text.strip()) else None

    return AnswerFormat("walk", "", extract, lambda text: extract(text) is not None)
