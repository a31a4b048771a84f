"""The rollout engine for any transformers causal LM, on any device, without compilation.

A prompt is computed once and its samples share the result; finished sequences leave the batch. The
model call, with its keys and values, is in ``runner``; here is who sits in which row, the loop, and what is
kept of a sequence meanwhile.

The calls run under ``no_grad``, not ``inference_mode``: whatever a module of the training model keeps from a
forward pass (a rotary table, a cached weight) must serve backward later; inference tensors cannot.

A call's prompts x samples are cut into waves that run one after the other. Within a wave every sequence owns
one row of the batch. When sequences finish, the rows at the end of the batch move into the holes, so each
finished sequence costs at most one row's copy and the batch shrinks at once; rows therefore change owners and
results are kept by sequence, never by row.

A sequence whose turn has ended leaves its wave and its keys and values are copied out of the batch. When it
goes on it joins the running wave, or begins the next, and only what was written is computed. Every time that
rows join, the keys and values of the whole batch are copied; so they wait until they are a fair share of it.
In a session that grows, new sequences join as well. Where sessions name their policy, what a sequence has
computed when its turn has ended is kept for others that begin with the same tokens (`prefixes`).

Given up: in a call a free row is not refilled with a waiting prompt, because in one padded batch the
newcomer's prefill would have to wait for, or pad to, everyone else. That is what a paged engine is for.
Sequences that go on do join, several at a time, because each of them would else wait for the slowest sequence
once a turn; and so do those that come later to a session that grows, whose clients wait for the slowest
sequence of others.
"""

from collections import abc, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model, eval_mode, layers_with_state
from qerl.families.sizes import positions_of
from qerl.fp4.linear import PackedLinear, dense_weights_kept
from qerl.noise.norms import noisy_norms
from qerl.rollout.engine import (
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    Session,
    WhenEnded,
    check_model,
    check_request,
    draw_rows,
    uniform_streams,
)
from qerl.rollout.portable.prefixes import Prefixes
from qerl.rollout.portable.runner import WORTH_SHARING, Kept, Runner, grouped_decode
from qerl.rollout.session import LastSession, Sequence, TrackedSession, whole_completions

KEPT_BYTES = 4 << 30
"""Keys and values that are kept between turns, and for others that begin alike: of 64 sequences of 1,400
tokens of SmolLM2-135M in FP32, 46 kB a token, beside about as much in the wave. A machine with 16 GB has room
for both; whoever ends its turn when those between turns fill them is computed again."""

JOINING_SHARE = 0.25
"""Rows join a wave once they are this share of it, because its keys and values are copied then:
0.6 GB for 64 x 200 tokens of that model, about as long as a decode step takes."""


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

    Attributes:
        rows: The sequence in each row of the batch; empty once all have left.
        ended: Those whose turn has ended and that have not left yet.
    """

    def __init__(self, sequences: abc.Iterable[Sequence] = ()) -> None:
        self.rows = list(sequences)
        self.ended: list[Sequence] = []

    def record(
        self,
        tokens: abc.Sequence[int],
        logprobs: abc.Sequence[float],
        entropies: abc.Sequence[float],
        finite: abc.Sequence[bool],
    ) -> list[Sequence]:
        """Append one drawn token to the sequence of each row.

        Args:
            tokens, logprobs, entropies, finite: Of each row.

        Returns:
            The sequences whose turn has ended, with their reasons.
        """
        for sequence, token, logprob, entropy, is_finite in zip(
            self.rows, tokens, logprobs, entropies, finite, strict=True
        ):
            if not is_finite:
                sequence.finish_reason = "error"
                self.ended.append(sequence)
                continue
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.entropies.append(entropy)
            if token in sequence.params.stop_token_ids:
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


class PortableSession(TrackedSession):
    """See ``qerl.rollout.engine.Session``.

    Args:
        params: Sampling parameters of sequences without their own.
        positions: Positions that the model has; None where it sets no limit.
        pad_token_id: Fills masked positions, and stands in for a turn whose first logits were not finite.
        model: The model, ready for a rollout.
        max_sequences: Sequences that are decoded at the same time at most.
        kept_bytes: Bytes of keys and values that are kept at most, between turns and for others.
        growing: Whether new sequences join the wave that runs, instead of waiting for the next.
        prefixes: What others have computed; None where no session has named its policy.
        policy: Name of the policy, by which its prefixes are found, or None. Sequences that may find some
            join, as where the session grows.

    Attributes:
        policy: As given.
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
        prefixes: Prefixes | None,
        policy: Hashable | None,
    ) -> None:
        super().__init__(params, positions, pad_token_id)
        self.policy, self._prefixes = policy, prefixes
        self._model, self._device = model, base_model(model).device
        self._max_sequences, self._kept_bytes = max_sequences, kept_bytes
        self._growing = growing or policy is not None
        self._waves: deque[list[Sequence]] = deque()  # of sequences that have not begun
        self._joining: list[Sequence] = []  # with tokens already or, where the session grows, without
        self._kept: dict[Sequence, Kept] = {}
        self._has_states = any(layers_with_state(base_model(model).config))
        self._uniforms: dict[Sequence, np.ndarray] = {}
        self._wave = Wave()
        self._runner: Runner | None = None

    def _add(self, sequences: list[Sequence]) -> None:
        if self._growing or any(sequence.token_ids for sequence in sequences):
            self._joining += [sequence for sequence in sequences if sequence.room]
            return
        prompts = len({sequence.prompt for sequence in sequences})
        samples = len(sequences) // prompts
        for wave in plan_waves(prompts, samples, self._max_sequences):
            planned = [sequences[each.prompt * samples + each.sample] for each in wave]
            with_room = [sequence for sequence in planned if sequence.room]
            if with_room:
                self._waves.append(with_room)

    def _resume(self, sequence: Sequence) -> None:
        self._joining.append(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._kept.pop(sequence, None)
        self._uniforms.pop(sequence, None)
        if self.policy is not None and self._runner is not None and sequence in self._wave.rows:
            self._put(sequence, self._runner.kept_of(self._wave.rows.index(sequence)))

    def give_up(self) -> None:
        """Drop all keys and values; those that run are the first of all that wait to join."""
        ended = set(self._wave.ended)
        running = [sequence for sequence in self._wave.rows if sequence not in ended]
        self._joining = running + self._joining
        self._wave, self._runner = Wave(), None
        self._kept.clear()

    def _decode(self, meanwhile: Callable[[], None] | None) -> list[Sequence]:
        """See `TrackedSession._decode`; a round is one step.

        The host takes part in all of it, so there is no better time for others than before it.
        """
        self._leave()
        if not (self._wave.rows or self._waves or self._joining):
            return []
        if meanwhile is not None:
            meanwhile()
        running = len(self._wave.rows)
        joining = min(len(self._joining), self._max_sequences - running) >= JOINING_SHARE * running
        if self._runner is not None:
            last = [sequence.token_ids[-1] for sequence in self._wave.rows]
            logits_BV = self._runner.step(torch.tensor(last, device=self._device))
            if joining:
                logits_BV = self._join(logits_BV)
        elif self._waves and len(self._joining) < JOINING_SHARE * self._max_sequences:
            logits_BV = self._begin(self._waves.popleft())
        else:
            logits_BV = self._join(None)
        rows = self._wave.rows
        numbers = [self._uniforms[sequence][len(sequence.token_ids)] for sequence in rows]
        uniforms_B = torch.tensor(numbers, dtype=torch.float64, device=logits_BV.device)
        drawn = draw_rows(logits_BV, uniforms_B, [sequence.params for sequence in rows])
        return self._wave.record(*(column.tolist() for column in drawn))

    def _leave(self) -> None:
        """Take those whose turn has ended out of the batch, with their keys and values if they may go on."""
        if self._runner is None:
            return
        leaving = set(self._wave.ended)
        for row, sequence in enumerate(self._wave.rows):
            if sequence in leaving and sequence.stage != "finished" and sequence.room:
                self._keep(sequence, self._runner.kept_of(row))
        sources = self._wave.compact()
        if sources:
            self._runner.keep(sources)
        elif not self._wave.rows:
            self._runner = None

    def _keep(self, sequence: Sequence, kept: Kept) -> None:
        if self._held + kept.nbytes <= self._kept_bytes:
            self._kept[sequence] = kept
        self._put(sequence, kept)

    def _put(self, sequence: Sequence, kept: Kept) -> None:
        """Let others that begin with what a sequence has take what it has computed of that."""
        if self._prefixes is None:
            return
        if self.policy is not None and sequence.finish_reason != "error":
            self._prefixes.put(self.policy, sequence.prompt.token_ids + sequence.token_ids, kept)
        self._prefixes.trim(self._kept_bytes - self._held)

    @property
    def _held(self) -> int:
        """Bytes that are kept between turns."""
        return sum(kept.nbytes for kept in self._kept.values())

    def _begin(self, sequences: list[Sequence]) -> torch.Tensor:
        """Begin a wave of sequences without a token; gives the logits [B, V] of each."""
        prompts = {sequence.prompt.number: sequence.prompt.token_ids for sequence in sequences}
        row_of = {number: row for row, number in enumerate(prompts)}
        self._enter(sequences)
        self._runner = Runner(self._model, self._pad_token_id)
        rows = [row_of[sequence.prompt.number] for sequence in sequences]
        return self._prefill(self._runner, list(prompts.values()), rows, self._longest_room())

    def _prefill(
        self,
        runner: Runner,
        texts: list[list[int]],
        rows: abc.Sequence[int],
        room: int,
        kept: abc.Sequence[Kept] = (),
    ) -> torch.Tensor:
        logits_BV = runner.prefill(texts, rows, room, kept)
        self.prefilled_tokens += sum(map(len, texts)) - runner.saved_tokens
        return logits_BV

    def _join(self, logits_BV: torch.Tensor | None) -> torch.Tensor:
        """Let those that wait for it join the wave, or begin one; gives the logits [B, V] of all.

        Args:
            logits_BV: Of those that run, None if none does.
        """
        free = self._max_sequences - len(self._wave.rows)
        entering, self._joining = self._joining[:free], self._joining[free:]
        self._look_up(entering)
        groups: dict[int, list[Sequence]] = {}
        for sequence in entering:
            groups.setdefault(self._computed_with(sequence), []).append(sequence)
        found = [] if logits_BV is None else [logits_BV]
        for _, sequences in sorted(groups.items(), reverse=True):
            self._enter(sequences)
            runner = Runner(self._model, self._pad_token_id)
            found.append(self._recompute(runner, sequences))
            if self._runner is None:
                self._runner = runner
            else:
                self._runner.join(runner, self._longest_room())
        return torch.cat(found)

    def _look_up(self, sequences: list[Sequence]) -> None:
        """Let sequences of which nothing is kept have what others computed of their texts."""
        if self._prefixes is None or self.policy is None:
            return
        found: dict[tuple[int, ...], Kept | None] = {}
        for sequence in sequences:
            text = (*sequence.prompt.token_ids, *sequence.token_ids)
            if sequence not in self._kept and text not in found:
                found[text] = self._prefixes.find(self.policy, text)
            if (kept := found.get(text)) is not None:
                self._kept.setdefault(sequence, kept)

    def _computed_with(self, sequence: Sequence) -> int:
        """Sequences that join are computed together if this number is the same: 0 where nothing is kept. The
        others have as many new tokens as each other, about so where no layer has a state."""
        if sequence not in self._kept:
            return 0
        new = len(sequence.prompt.token_ids) + len(sequence.token_ids) - self._kept[sequence].tokens
        return new if self._has_states else max(new, WORTH_SHARING).bit_length()

    def _recompute(self, runner: Runner, sequences: list[Sequence]) -> torch.Tensor:
        """Logits [B, V] of sequences that join, from their kept keys and values if there are any; equal texts
        that were not kept as those of two sequences are computed once."""
        texts = [(*sequence.prompt.token_ids, *sequence.token_ids) for sequence in sequences]
        kept = [self._kept.pop(sequence, None) for sequence in sequences]
        room = max(sequence.room for sequence in sequences)
        found = {(text, id(of)): of for text, of in zip(texts, kept, strict=True)}
        row_of = {key: row for row, key in enumerate(found)}
        rows = [row_of[text, id(of)] for text, of in zip(texts, kept, strict=True)]
        begun = [of for of in found.values() if of is not None]  # of all or of none
        return self._prefill(runner, [list(text) for text, _ in found], rows, room, begun)

    def _enter(self, sequences: list[Sequence]) -> None:
        """Give sequences rows behind those that run."""
        self._wave.rows += sequences
        new = [sequence for sequence in sequences if sequence not in self._uniforms]
        if new:
            longest = max(sequence.max_tokens for sequence in new)
            streams = uniform_streams([sequence.key for sequence in new], longest)
            self._uniforms.update(zip(new, streams.numpy(), strict=True))

    def _longest_room(self) -> int:
        return max(sequence.room for sequence in self._wave.rows)


ROWS = 64
"""Sequences that run at once if nobody says otherwise."""


class PortableEngine(RolloutEngine):
    """Samples from a transformers causal LM in place.

    Args:
        model: The model that trains, PEFT-wrapped or not. It is used as it is at each call and left as it
            was: same modes, same parameters.
        pad_token_id: Any id of the vocabulary; it fills masked positions and is the only token of a
            completion whose first logits were not finite.
        max_sequences: Sequences that run at once at most. Each needs memory for the keys and values of its
            prompt and of ``max_tokens`` tokens.
        kept_bytes: Bytes of keys and values that are kept at most, between turns and for others.

    Raises:
        QeRLError: No sequence may run at a time, or the model cannot be sampled from.
    """

    model: nn.Module
    keeps_prefixes = True

    def __init__(
        self,
        model: nn.Module,
        pad_token_id: int,
        max_sequences: int = ROWS,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        if max_sequences < 1:
            raise QeRLError(f"max_sequences is {max_sequences}; at least one sequence must run at a time.")
        check_model(model)
        self.model, self._base = model, base_model(model)
        self._positions = positions_of(self._base.config.get_text_config(decoder=True))
        self._packed = any(isinstance(module, PackedLinear) for module in model.modules())
        self._pad_token_id = pad_token_id
        self._max_sequences = self.rows_per_call = max_sequences
        self._kept_bytes = kept_bytes
        self._last = LastSession[PortableSession]()
        self._prefixes: Prefixes | None = None

    def release(self) -> None:
        """See ``RolloutEngine.release``: the last session computes its keys and values again."""
        if (session := self._last.session) is not None:
            session.give_up()
        self._forget()

    def reset(self) -> None:
        """See ``RolloutEngine.reset``."""
        self._forget()

    def _forget(self) -> None:
        """Keep no prefix."""
        if self._prefixes is not None:
            self._prefixes.forget()

    def generate(
        self,
        prompts: abc.Sequence[abc.Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        seeds: abc.Sequence[int] | None = None,
        ended: WhenEnded | None = None,
    ) -> RolloutResult:
        """See ``RolloutEngine.generate``."""
        check_request(prompts, samples_per_prompt, params, self._positions)
        opened = self.session(params, norm_offsets)
        return whole_completions(opened, prompts, samples_per_prompt, seeds=seeds, ended=ended)

    @contextmanager
    def session(
        self,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        growing: bool = False,
        longest_prompt: int | None = None,
        going_on: Session | None = None,
        policy: Hashable | None = None,
    ) -> Iterator[PortableSession]:
        """See ``RolloutEngine.session``."""
        with self._ready(norm_offsets or {}):
            if self._prefixes is None and policy is not None:
                self._prefixes = Prefixes(whole=any(layers_with_state(self._base.config)))
            if going_on is not None:
                session = self._last.again(going_on)
                if session.policy != policy:  # what its sequences have is of both
                    session.policy = None
            else:
                self._last.set_aside()
                session = PortableSession(
                    params,
                    self._positions,
                    self._pad_token_id,
                    self.model,
                    self._max_sequences,
                    self._kept_bytes,
                    growing,
                    self._prefixes,
                    policy,
                )
            with self._last.opened(session):
                yield session

    @contextmanager
    def _ready(self, norm_offsets: NormOffsets) -> Iterator[None]:
        """Everything about the model that differs between a rollout and training, for one call."""
        base = self._base
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(self.model))
            if base._supports_attention_backend:  # others compare the name of their attention with "sdpa"
                stack.enter_context(grouped_decode(base.config))
            if norm_offsets:
                stack.enter_context(noisy_norms(self.model, norm_offsets))
            if self._packed and base.device.type == "cpu":
                stack.enter_context(dense_weights_kept(self.model))
            yield
