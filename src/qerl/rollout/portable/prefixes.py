"""Keys and values of finished sequences, found by the tokens that a new one begins with.

A request with the whole conversation until now begins with a sequence that has ended, and one of another
trajectory with the same instructions; what both have in common need not be computed again. Found is the
longest common beginning with any sequence, to the token, since rows can be loaded up to any of theirs. A
layer with a state has it behind the last token alone, so there a sequence is found as a whole or not at all.

Keys and values are those of one policy. They are copies beside the batch, which takes copies of them again,
so any number of rows may begin with the same.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from qerl.rollout.portable.runner import WORTH_SHARING, Kept

_MOST = 1024
"""Sequences that are kept at most, because each is compared with each new text: some milliseconds for all."""


class Prefixes:
    """What finished sequences of a policy have computed.

    Args:
        policy: Name of the policy, noise included.
        whole: Whether a sequence can be gone on with behind its last token alone.
    """

    def __init__(self, policy: Hashable, whole: bool) -> None:
        self.policy, self._whole = policy, whole
        self._found: list[tuple[np.ndarray, Kept]] = []  # the last used at the end

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(kept.nbytes for _, kept in self._found)

    def find(self, text: Sequence[int]) -> Kept | None:
        """What there is of the longest beginning of a text, without its last token, whose logits are wanted;
        None where that is too short to be worth a call of the model."""
        wanted = np.asarray(text[:-1])
        best, most = -1, WORTH_SHARING - 1
        for place, (tokens, _) in enumerate(self._found):
            common = _common(tokens, wanted)
            if common > most and (common == len(tokens) or not self._whole):
                best, most = place, common
        if best < 0:
            return None
        self._found.append(self._found.pop(best))
        return Kept(most, self._found[-1][1].layers)

    def put(self, text: Sequence[int], kept: Kept, room: int) -> None:
        """Keep what a finished sequence has computed.

        Args:
            text: All its tokens, from the prompt's first one on.
            kept: Of as many of them as it says.
            room: Bytes that all may take; the longest unused go first.
        """
        tokens = np.asarray(text[: kept.tokens])
        if not self._whole:  # else somebody may go on behind the shorter one
            self._found = [each for each in self._found if _common(each[0], tokens) < len(each[0])]
        self._found.append((tokens, kept))
        self.trim(room)

    def trim(self, room: int) -> None:
        """Let the longest unused go until the others take no more than so many bytes."""
        held = self.nbytes
        while self._found and (held > room or len(self._found) > _MOST):
            held -= self._found.pop(0)[1].nbytes

    def forget(self) -> None:
        """Let all go."""
        self._found.clear()


def _common(some: np.ndarray, others: np.ndarray) -> int:
    """How many first tokens are the same."""
    length = min(len(some), len(others))
    differ = some[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length
