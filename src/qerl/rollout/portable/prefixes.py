"""Prefix cache: keys and values of sequences whose turn has ended, looked up by a new sequence's tokens.

A request that contains the conversation so far begins with an earlier sequence, and requests of different
trajectories begin with the same instructions; keys and values of common tokens need not be recomputed. A
lookup finds the longest common prefix with any stored sequence, exact to the token, since rows can be loaded
up to any token. A layer with a state has it only after the last token, so for such models a stored sequence
matches as a whole or not at all.

Entries belong to one policy, identified by its name. They are copies of rows of the batch and are copied
again when loaded, so any number of rows may use the same entry.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from qerl.rollout.portable.runner import WORTH_SHARING, Kept

_MOST = 1024
"""Maximum number of entries, because each is compared with each new text: some milliseconds for all."""


class _Ended(NamedTuple):
    policy: Hashable
    tokens: np.ndarray
    kept: Kept
    nbytes: int  # of `kept`; stored because it sums over many tensors


class Prefixes:
    """Keys and values of sequences whose turn has ended, for one or more policies.

    Args:
        whole: Whether a stored sequence can only be reused whole, because a layer has a state.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._ended: list[_Ended] = []  # least recently used first

    @property
    def nbytes(self) -> int:
        """Total bytes of all entries."""
        return sum(each.nbytes for each in self._ended)

    def find(self, policy: Hashable, text: Sequence[int]) -> Kept | None:
        """Return keys and values of the longest stored prefix of a text, or None if it is too short to pay.

        The last token of the text is never included, because its logits are needed.
        """
        wanted = np.asarray(text[:-1])
        best, most = -1, WORTH_SHARING - 1
        for place, each in enumerate(self._ended):
            common = _common(each.tokens, wanted) if each.policy == policy else 0
            if common > most and (common == len(each.tokens) or not self._whole):
                best, most = place, common
        if best < 0:
            return None
        self._ended.append(self._ended.pop(best))
        return Kept(most, self._ended[-1].kept.layers)

    def put(self, policy: Hashable, text: Sequence[int], kept: Kept) -> None:
        """Store keys and values of a sequence whose turn has ended, in place of useless entries.

        Its prefixes are replaced, or, where entries can only be reused whole, entries of the same tokens.

        Args:
            policy: Name of the policy, noise included.
            text: All its tokens, from the prompt's first one on.
            kept: Keys and values of the first ``kept.tokens`` of them.
        """
        tokens = np.asarray(text[: kept.tokens])
        self._ended = [
            each
            for each in self._ended
            if each.policy != policy
            or _common(each.tokens, tokens) < len(each.tokens)
            or (self._whole and len(each.tokens) < len(tokens))
        ]
        self._ended.append(_Ended(policy, tokens, kept, kept.nbytes))

    def trim(self, room: int) -> None:
        """Evict least recently used entries until at most ``room`` bytes and `_MOST` entries remain."""
        held = self.nbytes
        while self._ended and (held > room or len(self._ended) > _MOST):
            held -= self._ended.pop(0).nbytes

    def forget(self) -> None:
        """Drop all entries."""
        self._ended.clear()


def _common(some: np.ndarray, others: np.ndarray) -> int:
    """Return the length of the common prefix."""
    length = min(len(some), len(others))
    differ = some[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length
