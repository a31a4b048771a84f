"""What ends a turn beside stop tokens: asked on the host, of the tokens that a sequence has.

Stop tokens are compared where tokens are drawn. A text is not a token: it may begin inside one and end inside
another, and one character may be several tokens. So it is looked for in what tokens say together. The
portable engine asks after each token, the paged engine after each round, and what a round has drawn behind
the end is thrown away; a token's uniform number is keyed by its place, so nothing else changes.

A turn ends with the token that completes the text. That token stays whole, even where it says more than the
text: the policy drew it, and its log-probability is that of the whole token.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from qerl.errors import QeRLError

if TYPE_CHECKING:  # takes seconds
    from transformers import PreTrainedTokenizerBase

FinishReason = Literal["stop", "length", "error", "pause"]
"""Why a turn has ended."""

_MARGIN = 4
"""Tokens before the earliest one in which a text can begin: a decoder may strip the space before the first
token that it is given, and cannot say a character whose beginning it is not given."""

_HALF = "\ufffd"
"""What a decoder says of bytes that are no whole character."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Names of tokens that are one byte, in vocabularies that fall back to bytes."""


class Stop(ABC):
    """A condition that ends turns. It keeps nothing of a sequence, so one serves all.

    Attributes:
        reason: Why the turn has ended then.
        reads_tokens: Whether it looks at the tokens. If none of a sequence's stops does, the paged engine
            leaves its tokens on the GPU while it draws.
    """

    reason: FinishReason = "stop"
    reads_tokens = True

    @abstractmethod
    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """Where a turn ends.

        Args:
            prompt_ids: Before the sequence.
            token_ids: What the sequence has; some or all of the turn's may be missing if no stop of the
                sequence reads them.
            start: How many of them it had when its turn began.
            checked: How many of them are known not to end it, at least ``start``; more than those
                were drawn.

        Returns:
            How many tokens the sequence has when it ends, more than ``checked``; None if it goes on.
        """


class StopTokens(Stop):
    """Stop tokens that a row of the paged engine has no room for (`qerl.kernels.limits.STOP_TOKENS`).

    Args:
        ids: Any of these; the turn includes it.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = frozenset(ids)

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`."""
        places = range(checked, len(token_ids))
        return next((place + 1 for place in places if token_ids[place] in self._ids), None)


class StopStrings(Stop):
    """Texts that end turns, beginning and ending anywhere in tokens.

    Special tokens say nothing, as in the text that rewards read, except to a text that has one in it, such as
    ``<|im_start|>``.

    Args:
        tokenizer: Says what tokens stand for.
        strings: Any of these, within what the policy drew in the turn; the turn ends with the first token by
            which one is complete.

    Raises:
        QeRLError: There is none, or one is empty.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", strings: Sequence[str]) -> None:
        if not strings or not all(strings):
            raise QeRLError("A stop string is empty or there is none; give at least one character.")
        self._tokenizer = tokenizer
        special = tokenizer.all_special_tokens
        named = [text for text in strings if any(token in text for token in special)]
        self._by_skipping = {True: [text for text in strings if text not in named], False: named}
        self._silent = frozenset(tokenizer.all_special_ids)
        # Any other token says at least a byte, so a text is within as many of the last as it has bytes.
        self._most = max(len(text.encode()) for text in strings) + _MARGIN
        # The token that completes a text says its last character, or bytes of it.
        self._endings = {_HALF, *(text[-1] for text in strings)}
        self._may_complete: dict[int, bool] = {}
        self._one_byte: dict[int, bool] = {}

    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """See `Stop.end`."""
        for count in range(checked + 1, len(token_ids) + 1):
            if self._may_end(token_ids[count - 1]):
                first = self._earliest(token_ids, start, count)
                if self._is_in(token_ids[first:count]):
                    return count
        return None

    def _may_end(self, token_id: int) -> bool:
        """Whether a token may complete a text. Most may not, which spares their rounds the decoding."""
        if token_id not in self._may_complete:
            # Twice, because a decoder may strip the space before the first.
            said = self._tokenizer.decode([token_id, token_id], clean_up_tokenization_spaces=False)
            self._may_complete[token_id] = any(ending in said for ending in self._endings)
        return self._may_complete[token_id]

    def _earliest(self, token_ids: Sequence[int], start: int, count: int) -> int:
        """The first token in which a text may begin that the last of so many tokens completes.

        Bytes in a row are characters together or none of them is, so it is never within such a row.
        """
        place, saying = count, 0
        while place > start and (saying < self._most or self._is_byte(token_ids[place])):
            place -= 1
            saying += token_ids[place] not in self._silent
        return place

    def _is_byte(self, token_id: int) -> bool:
        """Whether a token stands for one byte by its name; one that says nothing divides no row of them."""
        if token_id not in self._one_byte:
            name = self._tokenizer.convert_ids_to_tokens(token_id)
            self._one_byte[token_id] = token_id in self._silent or bool(_BYTE.fullmatch(name or ""))
        return self._one_byte[token_id]

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        ids = list(token_ids)
        for skips, strings in self._by_skipping.items():
            if strings:
                text = self._tokenizer.decode(
                    ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
                )
                if any(string in text for string in strings):
                    return True
        return False


class Cut(NamedTuple):
    """Where a turn ends, and why.

    Attributes:
        tokens: How many the sequence has then.
        reason: Of the stop.
    """

    tokens: int
    reason: FinishReason


def first_cut(
    stops: Sequence[Stop], prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
) -> Cut | None:
    """Where the first of several stops ends a turn, or None; of those that end it together the first given.

    Args:
        stops: Any of them ends the turn.
        prompt_ids, token_ids, start, checked: As in `Stop.end`.
    """
    found = [(stop.end(prompt_ids, token_ids, start, checked), stop.reason) for stop in stops]
    cuts = [Cut(count, reason) for count, reason in found if count is not None]
    return min(cuts, key=lambda cut: cut.tokens, default=None)
