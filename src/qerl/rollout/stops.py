"""Conditions other than stop tokens that end a turn, checked on the host on a sequence's tokens.

Stop tokens are compared where tokens are drawn. A stop string is not a token: it may begin inside one token
and end inside another, and one character may be several tokens. So it is searched for in the decoded text.
The portable engine checks after each token, the paged engine after each round, and tokens that a round drew
past the end are discarded; a token's uniform number is keyed by its index, so nothing else changes.

A turn ends with the token that completes the string. That token is kept whole, even if its text is longer
than the string: the policy drew it, and its log-probability is that of the whole token.
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
"""Extra tokens decoded before the earliest one in which a stop string can begin: a decoder may strip the
space before its first token, and cannot decode a character whose first byte is missing."""

_HALF = "\ufffd"
"""The decoder's output for bytes that are no whole character."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Names of single-byte tokens, in vocabularies with byte fallback."""


class Stop(ABC):
    """A condition that ends turns. It holds no state per sequence, so all sequences can share one.

    Attributes:
        reason: Finish reason of a turn that it ends.
        reads_tokens: Whether it reads token ids. If none of a sequence's stops does, the paged engine keeps
            the sequence's tokens on the GPU while it draws.
    """

    reason: FinishReason = "stop"
    reads_tokens = True

    @abstractmethod
    def end(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
    ) -> int | None:
        """Return the length at which the turn ends, or None.

        Args:
            prompt_ids: Token ids of the prompt.
            token_ids: Token ids of the sequence; some or all of the turn's may be missing if no stop of the
                sequence reads them.
            start: Number of tokens of the sequence when its turn began.
            checked: Number of tokens known not to end the turn, at least ``start``, fewer than it has.

        Returns:
            Number of tokens of the sequence when its turn ends, more than ``checked``; None if it goes on.
        """


class StopTokens(Stop):
    """Stop tokens beyond those that fit in a row of the paged engine (`qerl.kernels.limits.STOP_TOKENS`).

    Args:
        ids: The turn ends with, and includes, the first of these tokens.
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
    """Strings that end turns; they may begin and end anywhere inside tokens.

    Special tokens are skipped in decoding, as in the text that rewards read, except for strings that contain
    one, such as ``<|im_start|>``.

    Args:
        tokenizer: Decodes the tokens.
        strings: Searched for in the tokens that the policy drew in the turn; the turn ends with the first
            token that completes any of them.

    Raises:
        QeRLError: There is no string, or one is empty.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", strings: Sequence[str]) -> None:
        if not strings or not all(strings):
            raise QeRLError(
                "The list of stop strings is empty, or has an empty string; give at least one character."
            )
        self._tokenizer = tokenizer
        special = tokenizer.all_special_tokens
        named = [text for text in strings if any(token in text for token in special)]
        self._by_skipping = {True: [text for text in strings if text not in named], False: named}
        self._silent = frozenset(tokenizer.all_special_ids)
        # Any other token is at least one byte of text, so a string of n bytes lies within the last n of them.
        self._most = max(len(text.encode()) for text in strings) + _MARGIN
        # The token that completes a string contains its last character, or bytes of it.
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
        """Return True if a token may complete a string; most tokens may not, which avoids decoding."""
        if token_id not in self._may_complete:
            # Decoded twice, because a decoder may strip the space before the first token.
            said = self._tokenizer.decode([token_id, token_id], clean_up_tokenization_spaces=False)
            self._may_complete[token_id] = any(ending in said for ending in self._endings)
        return self._may_complete[token_id]

    def _earliest(self, token_ids: Sequence[int], start: int, count: int) -> int:
        """Return the first index at which a string may begin that ends in token ``count - 1``.

        Consecutive byte tokens decode to characters only together, so the index is never inside such a run.
        """
        place, saying = count, 0
        while place > start and (saying < self._most or self._is_byte(token_ids[place])):
            place -= 1
            saying += token_ids[place] not in self._silent
        return place

    def _is_byte(self, token_id: int) -> bool:
        """Return True for a single-byte token, by its name, and for a special token, which splits no run."""
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
    """The end of a turn.

    Attributes:
        tokens: Number of tokens of the sequence at the end.
        reason: Reason of the stop.
    """

    tokens: int
    reason: FinishReason


def first_cut(
    stops: Sequence[Stop], prompt_ids: Sequence[int], token_ids: Sequence[int], start: int, checked: int
) -> Cut | None:
    """Return the earliest cut by any of several stops, or None; on a tie, the cut of the first given stop.

    Args:
        stops: The stops.
        prompt_ids, token_ids, start, checked: As in `Stop.end`.
    """
    found = [(stop.end(prompt_ids, token_ids, start, checked), stop.reason) for stop in stops]
    cuts = [Cut(count, reason) for count, reason in found if count is not None]
    return min(cuts, key=lambda cut: cut.tokens, default=None)
