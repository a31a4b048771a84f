"""Which sequences run when: plain Python, no tensors, no model.

A call's prompts x samples are cut into waves that run one after the other. Within a wave every sequence owns
one row of the batch. When sequences finish, the rows at the end of the batch move into the holes, so each
finished sequence costs at most one row's copy and the batch shrinks at once; rows therefore change owners and
results are kept by sequence, never by row.

Given up: a free row is not refilled with a waiting prompt, because in one padded batch the newcomer's prefill
would have to wait for, or pad to, everyone else. That is what a paged engine is for. Sequences that go on do
join a wave, several at a time, because each of them would else wait for the slowest sequence once a turn; and
so do those that come later to a session that grows, whose clients wait for the slowest sequence of others.
"""

from collections import abc
from collections.abc import Iterable
from typing import NamedTuple

from qerl.rollout.sequence import Sequence


class SequenceId(NamedTuple):
    """One completion to be made; prompts and samples are counted from 0 within the call."""

    prompt: int
    sample: int


def plan_waves(prompts: int, samples_per_prompt: int, max_sequences: int) -> list[list[SequenceId]]:
    """Cut prompts x samples into waves of at most ``max_sequences``, in order.

    A prompt's samples stay in one wave, where they share its prefill, unless there are more of them than a
    wave holds; then the prompt is computed once for each wave that it takes part in.
    """
    waves: list[list[SequenceId]] = []
    for prompt in range(prompts):
        for start in range(0, samples_per_prompt, max_sequences):
            stop = min(start + max_sequences, samples_per_prompt)
            group = [SequenceId(prompt, sample) for sample in range(start, stop)]
            if waves and len(waves[-1]) + len(group) <= max_sequences:
                waves[-1].extend(group)
            else:
                waves.append(group)
    return waves


class Wave:
    """Who sits in which row, and what each draws.

    Args:
        sequences: The first row's, the second row's, and so on.
        stop_token_ids: Tokens that end a turn.

    Attributes:
        rows: The sequence in each row of the batch; empty once all have left.
        ended: Those whose turn has ended and that have not left yet.
    """

    def __init__(self, sequences: Iterable[Sequence], stop_token_ids: Iterable[int]) -> None:
        self.rows = list(sequences)
        self.ended: list[Sequence] = []
        self._stop_token_ids = frozenset(stop_token_ids)

    def record(
        self,
        tokens: abc.Sequence[int],
        logprobs: abc.Sequence[float],
        entropies: abc.Sequence[float],
        finite: abc.Sequence[bool],
        rows: abc.Sequence[int] | None = None,
    ) -> list[Sequence]:
        """Append one drawn token to the sequence of each row.

        Args:
            tokens, logprobs, entropies, finite: Of each row.
            rows: Those rows; None for all.

        Returns:
            The sequences whose turn has ended, with their reasons.
        """
        of_rows = self.rows if rows is None else [self.rows[row] for row in rows]
        for sequence, token, logprob, entropy, is_finite in zip(
            of_rows, tokens, logprobs, entropies, finite, strict=True
        ):
            if not is_finite:
                sequence.finish_reason = "error"
                self.ended.append(sequence)
                continue
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.entropies.append(entropy)
            if token in self._stop_token_ids:
                sequence.finish_reason = "stop"
            elif cut := sequence.cut(len(sequence.token_ids) - 1):
                sequence.finish_reason = cut.reason
            elif not sequence.room:
                sequence.finish_reason = "length"
            else:
                continue
            self.ended.append(sequence)
        return list(self.ended)

    def compact(self) -> list[int] | None:
        """Let the sequences whose turn has ended leave.

        Returns:
            For each row of the smaller batch the row it was before: itself, except where a row from the end
            filled a hole. None when every row still runs.
        """
        if not self.ended:
            return None
        leaving = set(self.ended)
        alive = [row for row, sequence in enumerate(self.rows) if sequence not in leaving]
        staying = {row for row in alive if row < len(alive)}
        movers = iter(alive[len(staying) :])
        sources = [row if row in staying else next(movers) for row in range(len(alive))]
        self.rows, self.ended = [self.rows[row] for row in sources], []
        return sources
