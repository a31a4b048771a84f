"""Waves of the portable engine, and what is kept of a sequence while others write to it.

A sequence whose turn has ended leaves its wave and its keys and values are copied out of the batch. When it
goes on it joins the running wave, or begins the next, and only what was written is computed. Every time that
rows join, the keys and values of the whole batch are copied; so they wait until they are a fair share of it.
In a session that grows, new sequences join as well.
"""

from collections import abc, deque

import numpy as np
import torch
from torch import nn

from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.cache import KeysAndValues
from qerl.rollout.portable.runner import Runner
from qerl.rollout.portable.waves import Wave, plan_waves
from qerl.rollout.sampling import draw_tokens, uniform_streams
from qerl.rollout.sequence import Sequence, new_sequences
from qerl.rollout.session import TrackedSession

KEPT_BYTES = 4 << 30
"""Keys and values that are kept between turns: of 64 sequences of 1,400 tokens of SmolLM2-135M in FP32, 46 kB
a token, beside about as much in the wave. A machine with 16 GB has room for both; whoever ends its turn when
they are full is computed again."""

JOINING_SHARE = 0.25
"""Rows join a wave once they are this share of it, because its keys and values are copied then:
0.6 GB for 64 x 200 tokens of that model, about as long as a decode step takes."""


class PortableSession(TrackedSession[Sequence]):
    """See ``qerl.rollout.engine.Session``.

    Args:
        params: Sampling parameters.
        positions: Positions that the model has; None where it sets no limit.
        pad_token_id: Fills masked positions, and stands in for a turn whose first logits were not finite.
        model: The model, ready for a rollout.
        max_sequences: Sequences that are decoded at the same time at most.
        kept_bytes: Bytes of keys and values that are kept between turns at most.
        growing: Whether new sequences join the wave that runs, instead of waiting for the next.
    """

    def __init__(
        self,
        params: SamplingParams,
        positions: int | None,
        pad_token_id: int,
        model: nn.Module,
        max_sequences: int,
        kept_bytes: int,
        growing: bool,
    ) -> None:
        super().__init__(params, positions, pad_token_id)
        self._model, self._max_sequences, self._kept_bytes = model, max_sequences, kept_bytes
        self._growing = growing
        self._waves: deque[list[Sequence]] = deque()  # of sequences that have not begun
        self._joining: list[Sequence] = []  # those that go on or, where the session grows, begin
        self._kept: dict[Sequence, list[KeysAndValues]] = {}
        self._uniforms: dict[Sequence, np.ndarray] = {}
        self._wave = Wave([], params.stop_token_ids)
        self._runner: Runner | None = None
        self._tokens_B = torch.empty(0)

    def _add(self, prompts: list[list[int]], samples: int, limits: list[int]) -> list[Sequence]:
        added = new_sequences(prompts, samples, limits, self._started, self._started_prompts)
        if self._growing:
            self._joining += [sequence for sequence in added if sequence.room]
            return added
        for wave in plan_waves(len(prompts), samples, self._max_sequences):
            planned = [added[each.prompt * samples + each.sample] for each in wave]
            with_room = [sequence for sequence in planned if sequence.room]
            if with_room:
                self._waves.append(with_room)
        return added

    def _resume(self, sequence: Sequence) -> None:
        self._joining.append(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._kept.pop(sequence, None)
        self._uniforms.pop(sequence, None)

    def _decode(self) -> list[Sequence]:
        """See `TrackedSession._decode`; a round is one step."""
        self._leave()
        if not (self._wave.rows or self._waves or self._joining):
            return []
        if self._runner is not None:
            logits_BV = self._runner.step(self._tokens_B)
            joining = min(len(self._joining), self._max_sequences - len(self._wave.rows))
            if joining >= JOINING_SHARE * len(self._wave.rows):
                logits_BV = self._join(logits_BV)
        elif self._waves and len(self._joining) < JOINING_SHARE * self._max_sequences:
            logits_BV = self._begin(self._waves.popleft())
        else:
            logits_BV = self._join(None)
        drawn = draw_tokens(logits_BV, self._next_uniforms().to(logits_BV.device), self._params)
        self._tokens_B = drawn.tokens_B
        return self._wave.record(*(column.tolist() for column in drawn))

    def _leave(self) -> None:
        """Take those whose turn has ended out of the batch, with their keys and values if they may go on."""
        if self._runner is None:
            return
        leaving = set(self._wave.ended)
        for row, sequence in enumerate(self._wave.rows):
            if sequence in leaving and sequence.stage != "finished" and sequence.room:
                self._keep(sequence, self._runner.keys_of(row))
        sources = self._wave.compact()
        if sources:
            self._runner.keep(sources)
            self._tokens_B = self._tokens_B[sources]
        elif not self._wave.rows:
            self._runner = None

    def _keep(self, sequence: Sequence, keys: list[KeysAndValues]) -> None:
        held = sum(_bytes(kept) for kept in self._kept.values())
        if held + _bytes(keys) <= self._kept_bytes:
            self._kept[sequence] = keys

    def _begin(self, sequences: list[Sequence]) -> torch.Tensor:
        """Begin a wave of sequences without a token; gives the logits [B, V] of each."""
        prompts = {sequence.prompt.number: sequence.prompt.token_ids for sequence in sequences}
        row_of = {number: row for row, number in enumerate(prompts)}
        self._enter(sequences)
        self._runner = Runner(self._model, self._pad_token_id)
        rows = [row_of[sequence.prompt.number] for sequence in sequences]
        return self._prefill(self._runner, list(prompts.values()), rows, self._longest_room())

    def _prefill(
        self, runner: Runner, texts: list[list[int]], rows: abc.Sequence[int], room: int
    ) -> torch.Tensor:
        logits_BV = runner.prefill(texts, rows, room)
        self.prefilled_tokens += sum(map(len, texts)) - runner.saved_tokens
        return logits_BV

    def _join(self, logits_BV: torch.Tensor | None) -> torch.Tensor:
        """Let those that wait for it join the wave, or begin one; gives the logits [B, V] of all.

        Args:
            logits_BV: Of those that run, None if none does.
        """
        free = self._max_sequences - len(self._wave.rows)
        entering, self._joining = self._joining[:free], self._joining[free:]
        groups = [[s for s in entering if s in self._kept], [s for s in entering if s not in self._kept]]
        found = [] if logits_BV is None else [logits_BV]
        for sequences in filter(None, groups):
            self._enter(sequences)
            runner = Runner(self._model, self._pad_token_id)
            found.append(self._recompute(runner, sequences))
            if self._runner is None:
                self._runner = runner
            else:
                self._runner.join(runner, self._longest_room())
        return torch.cat(found)

    def _recompute(self, runner: Runner, sequences: list[Sequence]) -> torch.Tensor:
        """Logits [B, V] of sequences that join, from their kept keys and values; where nothing is kept of
        any, equal texts are computed once."""
        texts = [sequence.prompt.token_ids + sequence.token_ids for sequence in sequences]
        room = max(sequence.room for sequence in sequences)
        if sequences[0] not in self._kept:
            row_of = {text: row for row, text in enumerate(dict.fromkeys(map(tuple, texts)))}
            rows = [row_of[tuple(text)] for text in texts]
            return self._prefill(runner, list(map(list, row_of)), rows, room)
        kept = [self._kept.pop(sequence) for sequence in sequences]
        self.prefilled_tokens += sum(
            len(text) - layers[0][0].shape[1] for text, layers in zip(texts, kept, strict=True)
        )
        return runner.resume(texts, kept, room)

    def _enter(self, sequences: list[Sequence]) -> None:
        """Give sequences rows behind those that run."""
        self._wave.rows += sequences
        new = [sequence for sequence in sequences if sequence not in self._uniforms]
        if new:
            longest = max(sequence.max_tokens for sequence in new)
            streams = uniform_streams([sequence.key for sequence in new], longest)
            self._uniforms.update(zip(new, streams.numpy(), strict=True))

    def _next_uniforms(self) -> torch.Tensor:
        """fp64 [B], the number of each row's next token."""
        rows = self._wave.rows
        return torch.tensor([self._uniforms[each][len(each.token_ids)] for each in rows], dtype=torch.float64)

    def _longest_room(self) -> int:
        return max(sequence.room for sequence in self._wave.rows)


def _bytes(kept: list[KeysAndValues]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in kept)
