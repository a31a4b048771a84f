"""Drafts of what a sequence will draw next: what followed its last tokens where they stood before.

A token is drawn by inverting its distribution at a number that belongs to the sequence and the place alone
(`qerl.rollout.engine`). So an engine may compute several positions of a sequence in one pass, behind
drafted tokens, and draw at each with the position's own number: as long as what is drawn is what was drafted,
it is what would have been drawn one by one, and the first that is not is still drawn rightly. There is
nothing to reject at random, and log-probabilities are those of the same distributions.

They are the same up to rounding. A pass over more tokens adds in another order, and whoever ends earlier by
accepted drafts leaves the others in smaller passes earlier; so last bits differ as between two batch sizes,
and a number that falls between two such sums draws another token. In FP32 that hardly ever happens.

Only what the session itself has drawn is looked through, the sequence and its siblings. Completions of
earlier calls would be drafts too, but a resumed run does not have them, and without them it would have other
last bits.
"""

from collections.abc import Iterable, Sequence

from qerl.rollout.session import Prompt
from qerl.rollout.session import Sequence as Drawing

LONGEST_MATCH = 8
"""Tokens that are compared at most."""

FEW_ROWS = 4
"""Sequences that run beside each other at most where drafts are made: a pass over so many with their drafts
reads the weights once, as a pass without drafts does, and takes little longer."""


class Text:
    """Tokens that grow, and where each run of up to `LONGEST_MATCH` of them was last followed by another.

    Args:
        tokens: Those known at first.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        first = max(1, len(self.tokens))
        self.tokens += tokens
        for end in range(first, len(self.tokens)):
            for match in range(1, min(LONGEST_MATCH, end) + 1):
                self._ends[tuple(self.tokens[end - match : end])] = end

    def after(self, run: tuple[int, ...], length: int) -> list[int]:
        """What followed these tokens where they stood last, so many at most; empty if they did not."""
        end = self._ends.get(run)
        return [] if end is None else self.tokens[end : end + length]


def draft(text: Text, others: Sequence[Text], length: int, least: int = 1) -> list[int]:
    """What followed the longest run of a text's last tokens: in the text itself, else in one of the others.

    Args:
        text: Prompt and completion so far.
        others: Where else to look.
        length: Tokens of a draft at most.
        least: Tokens that must agree.
    """
    for match in range(min(LONGEST_MATCH, len(text.tokens)), least - 1, -1):
        run = tuple(text.tokens[-match:])
        for source in (text, *others):
            if found := source.after(run, length):
                return found
    return []


class Drafts:
    """Drafts for the sequences of a session, from themselves and from each other.

    Args:
        length: Tokens of a draft at most.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._texts: dict[Drawing, Text] = {}
        self._finished: dict[Prompt, list[Text]] = {}

    def of(self, rows: Sequence[Drawing], session: Iterable[Drawing]) -> list[list[int]]:
        """A draft for each of the sequences that run, shorter than its room.

        Args:
            rows: Those that run.
            session: All that were not finished, of which the samples of the same prompts are looked through.
        """
        prompts = {sequence.prompt for sequence in rows}
        groups = [sequence for sequence in session if sequence.prompt in prompts]
        self._texts = {sequence: self._text(sequence) for sequence in groups}
        self._finished = {prompt: self._texts_finished(prompt) for prompt in prompts}
        return [
            draft(
                self._texts[row],
                [self._texts[each] for each in groups if each is not row and each.prompt is row.prompt]
                + self._finished[row.prompt],
                min(self._length, row.room - 1),
            )
            for row in rows
        ]

    def _texts_finished(self, prompt: Prompt) -> list[Text]:
        """Those of the prompt's finished sequences."""
        known = self._finished.get(prompt, [])
        return known + [Text([*prompt.token_ids, *tokens]) for tokens in prompt.finished[len(known) :]]

    def _text(self, sequence: Drawing) -> Text:
        """Prompt and tokens of a sequence, as far as they are known."""
        text = self._texts.get(sequence)
        if text is None:
            return Text([*sequence.prompt.token_ids, *sequence.token_ids])
        text.extend(sequence.token_ids[len(text.tokens) - len(sequence.prompt.token_ids) :])
        return text
