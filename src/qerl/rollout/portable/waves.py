"""Which sequences run when: plain Python, no tensors, no model.

A call's prompts x samples are cut into waves that run one after the other. Within a wave every sequence owns
one row of the batch. When sequences finish, the rows at the end of the batch move into the holes, so each
finished sequence costs at most one row's copy and the batch shrinks at once; rows therefore change owners and
results are kept by sequence, never by row.

Given up: a free row is not refilled with a waiting prompt, because in one padded batch the newcomer's prefill
would have to wait for, or pad to, everyone else. That is what a paged engine is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qerl.rollout.engine import Completion, FinishReason, SamplingParams


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


@dataclass
class _Draft:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def append(self, token: int, logprob: float, entropy: float) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)


class Wave:
    """The sequences of one wave: who sits in which row, what each has sampled, who is finished.

    Args:
        size: Sequences in the wave; row i starts out as sequence i.
        params: ``max_tokens`` and ``stop_token_ids`` decide when a sequence ends.
        pad_token_id: The only token of a completion whose very first logits were not finite.
        limits: Tokens that each sequence may have; ``max_tokens`` for all of them if None.

    Attributes:
        rows: Index of the sequence in each row of the batch; empty once all have finished.
    """

    def __init__(
        self, size: int, params: SamplingParams, pad_token_id: int, limits: Sequence[int] | None = None
    ) -> None:
        self.rows = list(range(size))
        self._drafts = [_Draft() for _ in range(size)]
        self._limits = limits or [params.max_tokens] * size
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._pad_token_id = pad_token_id

    def record(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        entropies: Sequence[float],
        finite: Sequence[bool],
    ) -> None:
        """Append one sampled token to the sequence of each row and end those that are done."""
        for row, index in enumerate(self.rows):
            draft = self._drafts[index]
            if not finite[row]:
                draft.finish_reason = "error"
                if not draft.token_ids:
                    draft.append(self._pad_token_id, 0.0, 0.0)
                continue
            draft.append(tokens[row], logprobs[row], entropies[row])
            if tokens[row] in self._stop_token_ids:
                draft.finish_reason = "stop"
            elif len(draft.token_ids) == self._limits[index]:
                draft.finish_reason = "length"

    def compact(self) -> list[int] | None:
        """Take finished sequences out of the batch.

        Returns:
            For each row of the smaller batch the row it was before: itself, except where a row from the end
            filled a hole. None when every row still runs.
        """
        alive = [row for row, index in enumerate(self.rows) if self._drafts[index].finish_reason is None]
        if len(alive) == len(self.rows):
            return None
        staying = {row for row in alive if row < len(alive)}
        movers = iter(alive[len(staying) :])
        sources = [row if row in staying else next(movers) for row in range(len(alive))]
        self.rows = [self.rows[row] for row in sources]
        return sources

    def completions(self) -> list[Completion]:
        """The finished completions in the order of the sequences."""
        return [
            Completion(draft.token_ids, draft.logprobs, draft.entropies, draft.finish_reason)
            for draft in self._drafts
            if draft.finish_reason is not None
        ]
