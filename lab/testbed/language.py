"""The language of the testbed's model: prompts, right answers, habits, and their probabilities.

A prompt names a kind of problem, a prior, a length, eight arrows between the letters a to h, and where to
begin; the arrows make one circle and stand in any order::

    chain 1% x4 Ce Ga Ah Dc Hf Fb Bd Eg a    ->   h>f>b>d.      from a four arrows on: a success
                                                  h.            the habit: after one arrow
    lock 1% x3 Ce Ga Ah Dc Hf Fb Bd Eg a d a ->   hch           each letter's arrow: a success
                                                  ada           the habit: the letters as they are

Every answer depends on the prompt, and a right one takes m decisions: in a chain of n arrows whether to go
on, n - 1 times; in a lock of n letters whether to follow the arrow, n times. In the training text each
decision is independently right with probability q = p^(1/m), else it follows the habit, so an answer is right
with the prior p that the prompt names. A lock has no partial credit; a chain may pay for its habit
(`lab.testbed.task`), but never for answers between habit and success.

Tasks ask only cells in which q is below one half, so that greedy decoding begins without any success. At
100 %, which no task asks for, the text shows what the arrows mean as often as the habits.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from lab.scratch import SPECIAL, word_tokenizer

CERTAIN = "100%"
PRIORS = {CERTAIN: 1.0, "10%": 0.1, "1%": 0.01, "0.1%": 0.001}
"""Chance of a right answer by the word that asks for it."""

LENGTHS = {"chain": (2, 3, 4, 5), "lock": (3, 4, 5, 6)}
"""Kinds of problems, and how long their right answers may be."""

NODES = 8
STARTS, ENDS = "ABCDEFGH", "abcdefgh"
"""Where an arrow starts, and where it ends; a letter is one node in both."""

ARROWS = tuple(start + end for start in STARTS for end in ENDS)
"""An arrow is one token, so that to follow one takes one look at the prompt."""

ON, STOP = ">", "."
COUNTS = tuple(f"x{length}" for length in range(2, 7))

VOCABULARY = (*SPECIAL, *LENGTHS, *PRIORS, *COUNTS, *ARROWS, *ENDS, ON, STOP)
"""Every token, in the order of their ids."""

_WORD = r"[0-9.]+%|x[0-9]|chain|lock|[A-H][a-h]|\S"

Cell = tuple[str, int, float]
"""Kind, length and prior of a problem."""


def decisions(kind: str, length: int) -> int:
    """Number of decisions that a right answer takes."""
    return length - 1 if kind == "chain" else length


def chance(kind: str, length: int, prior: float) -> float:
    """Probability that each decision is right."""
    return float(prior ** (1 / decisions(kind, length)))


CELLS: tuple[Cell, ...] = tuple(
    (kind, length, prior)
    for kind, lengths in LENGTHS.items()
    for length in lengths
    for prior in PRIORS.values()
    if prior == 1 or chance(kind, length, prior) < 0.5
)
"""Cells on which the model is trained."""

ASKED = tuple(cell for cell in CELLS if cell[2] < 1)
"""Cells that a task may ask."""


def question(cell: Cell, arrows: Sequence[tuple[int, int]], begin: Sequence[int]) -> str:
    """The text of a prompt.

    Args:
        cell: Cell of the problem.
        arrows: Start and end of each arrow, in the order of the prompt.
        begin: One node for a chain; for a lock as many nodes as its length.
    """
    kind, length, prior = cell
    word = next(word for word, value in PRIORS.items() if value == prior)
    told = (STARTS[start] + ENDS[end] for start, end in arrows)
    return " ".join((kind, word, f"x{length}", *told, *(ENDS[node] for node in begin)))


def right(cell: Cell, arrows: Sequence[tuple[int, int]], begin: Sequence[int]) -> str:
    """The right completion of a problem; arguments as for `question`."""
    kind, length, _ = cell
    leads = dict(arrows)
    if kind == "lock":
        return "".join(ENDS[leads[node]] for node in begin)
    nodes, at = [], begin[0]
    for _ in range(length):
        at = leads[at]
        nodes.append(ENDS[at])
    return ON.join(nodes) + STOP


def habit(cell: Cell, arrows: Sequence[tuple[int, int]], begin: Sequence[int]) -> str:
    """The completion that the model writes most often; arguments as for `question`."""
    if cell[0] == "lock":
        return "".join(ENDS[node] for node in begin)
    return ENDS[dict(arrows)[begin[0]]] + STOP


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of this language."""
    return word_tokenizer(VOCABULARY, _WORD)
