"""Keys and values of sequences whose turn has ended, found by the tokens that a new one begins with.

A request with the whole conversation until now begins with a sequence that has ended, and one of another
trajectory with the same instructions; what both have in common need not be computed again. Found is the
longest common beginning with any sequence, to the token, since rows can be loaded up to any of theirs. A
layer with a state has it behind the last token alone, so there a sequence is found as a whole or not at all.

Keys and values are those of one policy, which has a name. They are copies beside the batch, which takes
copies of them again, so any number of rows may begin with the same.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from qerl.rollout.portable.runner import WORTH_SHARING, Kept

_MOST = 1024
"""Sequences that are kept at most, because each is compared with each new text: some milliseconds for all."""


class _Ended(NamedTuple):
    policy: Hashable
    tokens: np.ndarray
    kept: Kept


class Prefixes:
    """What sequences whose turn has ended have computed, of some policies.

    Args:
        whole: Whether a sequence can be gone on with behind its last token alone.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._ended: list[_Ended] = []  # the last used at the end

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(each.kept.nbytes for each in self._ended)

    def find(self, policy: Hashable, text: Sequence[int]) -> Kept | None:
        """What a policy has of the longest beginning of a text, without its last token, whose logits are
        wanted; None where that is too short to be worth a call of the model."""
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
        """Keep what a sequence whose turn has ended has computed.

        Args:
            policy: Name of the policy, noise included.
            text: All its tokens, from the prompt's first one on.
            kept: Of as many of them as it says.
        """
        tokens = np.asarray(text[: kept.tokens])
        if not self._whole:  # else somebody may go on behind the shorter one
            self._ended = [
                each
                for each in self._ended
                if each.policy != policy or _common(each.tokens, tokens) < len(each.tokens)
            ]
        self._ended.append(_Ended(policy, tokens, kept))

    def trim(self, room: int) -> None:
        """Let the longest unused go until the others take no more than so many bytes."""
        held = self.nbytes
        while self._ended and (held > room or len(self._ended) > _MOST):
            held -= self._ended.pop(0).kept.nbytes

    def forget(self) -> None:
        """Let all go."""
        self._ended.clear()


def _common(some: np.ndarray, others: np.ndarray) -> int:
    """How many first tokens are the same."""
    length = min(len(some), len(others))
    differ = some[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length
