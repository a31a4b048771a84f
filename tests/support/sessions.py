"""What tests of sessions share: scripted ones, and trajectories that are told what they would have drawn.

A token's uniform number is keyed by its place in the completion, so after such text the policy must draw what
it would have drawn without the pause.
"""

from abc import abstractmethod

import pytest

from qerl.rollout.engine import Completion
from qerl.rollout.session import Sequence, TrackedSession


class WholeTurns(TrackedSession):
    """A session without a model, in which every turn is made at once."""

    def __init__(self, params, positions) -> None:
        super().__init__(params, positions, pad_token_id=0)
        self._waiting = []

    @abstractmethod
    def turn(self, sequence: Sequence) -> Completion:
        """What a sequence says next."""

    def _add(self, sequences):
        self._waiting += [sequence for sequence in sequences if sequence.room]

    def _resume(self, sequence):
        self._waiting.append(sequence)

    def _drop(self, sequence):
        pass

    def _decode(self, meanwhile):
        ended, self._waiting = self._waiting, []
        for sequence in ended:
            said = self.turn(sequence)
            sequence.token_ids += said.token_ids
            sequence.logprobs += said.logprobs
            sequence.entropies += said.entropies
            sequence.finish_reason = said.finish_reason
        return ended


def play(session, uninterrupted, written, order=lambda ended: ended, late=()):
    """Play the sequences of a session to their ends, or to where nothing more can be written.

    Args:
        session: Its sequences were started; its stop tokens end turns.
        uninterrupted: What each sequence would have drawn in one turn.
        written: Tokens that others write after each turn.
        order: In which order sequences that end together are answered.
        late: Prompts; behind each of the first rounds one of them is started.

    Returns:
        Token ids, log-probabilities (None where others wrote), and number of turns of each, by index.
    """
    found, late = {}, list(late)
    while session.busy:
        for ended in order(session.next(one_round=bool(late))):
            tokens, logprobs, turns = found.get(ended.index, ([], [], 0))
            tokens, logprobs = tokens + ended.completion.token_ids, logprobs + ended.completion.logprobs
            rest = uninterrupted[ended.index].token_ids[len(tokens) :][:written]
            if ended.completion.finish_reason == "stop" and session.room(ended.index) > written:
                session.go_on(ended.index, rest)
                tokens, logprobs = tokens + rest, logprobs + [None] * len(rest)
            else:
                session.finish(ended.index)
            found[ended.index] = tokens, logprobs, turns + 1
        if late:
            session.start([late.pop(0)], 1)
    return found


def check_against(found, uninterrupted, bound=1e-5):
    """Everything that was drawn is what the uninterrupted runs drew, log-probabilities within a bound."""
    assert sorted(found) == list(range(len(uninterrupted)))
    for index, (tokens, logprobs, _) in found.items():
        whole = uninterrupted[index]
        assert tokens == whole.token_ids[: len(tokens)]
        assert len(tokens) == len(logprobs)
        drawn = [place for place, value in enumerate(logprobs) if value is not None]
        assert [logprobs[i] for i in drawn] == pytest.approx([whole.logprobs[i] for i in drawn], abs=bound)
