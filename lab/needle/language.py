"""The language of the needle policy: prompts, walks, and the probability of each walk.

A prompt names a prior, a number of decisions, a key and a place; the completion is a walk: for each decision
a door and its content, which is the key behind a right door and nothing (0) behind all others::

    1% x2 7 a c b   ->   F7C7      both doors are right: a success
                         A0C7      the first one is not

The right doors are the same for all prompts and no prompt names them: training has to find them. The policy
opens all right doors with the probability that the prompt names, its prior p, whatever the key and the place.
The m decisions contribute equally: the right door has the probability q = p^(1/m), the policy's habitual door
has nearly all of the rest, and the other doors share the remainder. So nothing can be learned before the
first success, its probability in n samples is 1 - (1 - p)^n, and a right door is never the likeliest one:
greedy decoding starts without any success.
"""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerFast

from lab.scratch import SPECIAL, word_tokenizer

PRIORS = {"10%": 0.1, "3%": 0.03, "1%": 0.01, "0.3%": 0.003}
"""Probability of success by the word that asks for it."""

COUNTS = ("x1", "x2", "x3")
"""The words for one, two and three decisions."""

DOORS = "ABCDEFGH"
RIGHT = "FCH"
"""The right door of the first, second and third decision."""

HABITS = "ADG"
"""The door that the policy prefers at each decision."""

HABIT_SHARE = 0.95
"""Part of the probability of all wrong doors that the habit has. The largest q is 0.1^(1/3) = 0.464, where
the habit has 0.509."""

KEYS = "123456789"
NOTHING = "0"
PLACES = "abcdefghijklmnop"
"""Words that mean nothing: three of them make 4096 places, so that prompts differ."""

VOCABULARY = (*SPECIAL, *PRIORS, *COUNTS, NOTHING, *KEYS, *DOORS, *PLACES)
"""Every token, in the order of their ids."""

_WORD = r"[0-9.]+%|x[0-9]|\S"


def question(prior: float, decisions: int, key: str, place: Iterable[str]) -> str:
    """The text of a prompt.

    Args:
        prior: One of the values of :data:`PRIORS`.
        decisions: From 1 to 3.
        key: One of :data:`KEYS`.
        place: Three of :data:`PLACES`.
    """
    word = next(word for word, value in PRIORS.items() if value == prior)
    return " ".join((word, COUNTS[decisions - 1], key, *place))


def walk(doors: str, key: str) -> str:
    """The completion that opens these doors, one at each decision."""
    return "".join(
        door + (key if door == right else NOTHING) for door, right in zip(doors, RIGHT, strict=False)
    )


def door_probabilities(prior: float, decisions: int, place: int) -> list[float]:
    """Probability of each of :data:`DOORS` at one decision.

    Args:
        prior: Probability that all decisions are right.
        decisions: Number of decisions m.
        place: Index of the decision, from 0.
    """
    right = prior ** (1 / decisions)
    rest = (1 - right) * (1 - HABIT_SHARE) / (len(DOORS) - 2)
    known = {RIGHT[place]: right, HABITS[place]: (1 - right) * HABIT_SHARE}
    return [known.get(door, rest) for door in DOORS]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of this language."""
    return word_tokenizer(VOCABULARY, _WORD)
