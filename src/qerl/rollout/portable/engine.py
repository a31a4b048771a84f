"""The rollout engine for any transformers causal LM, on any device, without compilation.

A prompt is computed once and its samples share the result; finished sequences leave the batch. The model
call and the KV cache are in ``runner``; this module assigns sequences to rows, runs the decode loop, and
tracks the sequences.

The calls run under ``no_grad``, not ``inference_mode``: tensors that a module of the trained model keeps from
a forward pass (a rotary table, a cached weight) are used in backward later; inference tensors cannot be.

The prompts x samples of a call are split into waves that run one after the other. Within a wave every
sequence owns one row of the batch. When sequences finish, the rows at the end of the batch move into the
holes, so each finished sequence costs at most one row's copy and the batch shrinks at once; rows therefore
change owners, and results are stored by sequence, never by row.

A sequence whose turn has ended leaves its wave, and its keys and values are copied out of the batch. When it
goes on, it joins the running wave or begins the next, and only the appended tokens are prefilled. Each time
rows join, the keys and values of the whole batch are copied; so rows wait until enough of them can join
together. In a growing session, new sequences join as well. If sessions name their policy, keys and values of
a sequence whose turn has ended are kept for sequences that begin with the same tokens (`prefixes`).

Given up: within a call a free row is not refilled with a waiting prompt, because in one padded batch the new
row's prefill would have to wait for, or pad to, all other rows. The paged engine solves that. Sequences that
go on do join, several at a time, because otherwise each would wait for the slowest sequence once per turn; so
do later sequences of a growing session, whose clients would otherwise wait for the slowest sequence of other
clients.
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
"""Maximum bytes of keys and values kept between turns and for common prefixes: enough for 64 sequences of
1,400 tokens of SmolLM2-135M in FP32, 46 kB per token, beside about as much in the wave. A machine with 16 GB
has room for both. A sequence that no longer fits when its turn ends is recomputed."""

JOINING_SHARE = 0.25
"""Rows join a wave once they are at least this fraction of it, because joining copies its keys and values:
0.6 GB for 64 x 200 tokens of that model, which takes about as long as a decode step."""


class SequenceId(NamedTuple):
    """A planned completion; prompts and samples are counted from 0 within the call."""

    prompt: int
    sample: int


def plan_waves(prompts: int, samples_per_prompt: int, max_sequences: int) -> list[list[SequenceId]]:
    """Split prompts x samples into waves of at most ``max_sequences``, in order.

    A prompt's samples stay in one wave, where they share its prefill, unless a wave cannot hold them all;
    then the prompt is computed once per wave.
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
    """Sequences decoded together, one per row of the batch.

    Args:
        sequences: The sequence of each row, in order.

    Attributes:
        rows: The sequence in each row of the batch; empty once all have left.
        ended: Sequences whose turn has ended and that are still in the batch.
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
            tokens, logprobs, entropies, finite: One value per row; see `Drawn`.

        Returns:
            The sequences whose turn has ended, with `finish_reason` set.
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
        """Remove the sequences whose turn has ended.

        Returns:
            The previous row of each row of the smaller batch: the same row, except where a row from the end
            filled a hole. None if no sequence has ended.
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
        positions: The model's maximum number of positions; None if it has no limit.
        pad_token_id: Fills masked positions, and is the only token of a turn whose first logits were not
            finite.
        model: The model, ready for a rollout.
        max_sequences: Maximum number of sequences decoded at the same time.
        kept_bytes: Maximum bytes of keys and values kept between turns and as prefixes.
        growing: Whether new sequences join the running wave instead of waiting for the next.
        prefixes: Keys and values of ended turns; None if no session has named its policy.
        policy: Name of the policy, by which its prefixes are looked up, or None. With a name, new sequences
            join the running wave as if ``growing``.

    Attributes:
        policy: As given; None after the session was entered again with another name.
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
        self._waves: deque[list[Sequence]] = deque()  # of sequences without tokens
        self._joining: list[Sequence] = []  # with tokens or, in a growing session, without
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
        """Drop all keys and values, and put the running sequences at the front of those waiting to join."""
        ended = set(self._wave.ended)
        running = [sequence for sequence in self._wave.rows if sequence not in ended]
        self._joining = running + self._joining
        self._wave, self._runner = Wave(), None
        self._kept.clear()

    def _decode(self, meanwhile: Callable[[], None] | None) -> list[Sequence]:
        """See `TrackedSession._decode`; a round is one decode step.

        The host takes part in the whole step, so ``meanwhile`` is called before it.
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
        """Remove sequences whose turn has ended from the batch, keeping keys and values if they may go on."""
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
        """Store a sequence's keys and values for sequences that begin with the same tokens."""
        if self._prefixes is None:
            return
        if self.policy is not None and sequence.finish_reason != "error":
            self._prefixes.put(self.policy, sequence.prompt.token_ids + sequence.token_ids, kept)
        self._prefixes.trim(self._kept_bytes - self._held)

    @property
    def _held(self) -> int:
        """Bytes of keys and values kept between turns."""
        return sum(kept.nbytes for kept in self._kept.values())

    def _begin(self, sequences: list[Sequence]) -> torch.Tensor:
        """Begin a wave of sequences without tokens, and return their logits [B, V]."""
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
        """Add waiting sequences to the wave, or begin a wave of them; return the logits [B, V] of all rows.

        Args:
            logits_BV: Logits of the running rows; None if there are none.
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
        """Look up stored prefixes for sequences whose own keys and values were not kept."""
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
        """Return the key by which joining sequences are batched: 0 without kept keys and values, otherwise
        the number of new tokens, or its power-of-two bucket if no layer has a state."""
        if sequence not in self._kept:
            return 0
        new = len(sequence.prompt.token_ids) + len(sequence.token_ids) - self._kept[sequence].tokens
        return new if self._has_states else max(new, WORTH_SHARING).bit_length()

    def _recompute(self, runner: Runner, sequences: list[Sequence]) -> torch.Tensor:
        """Return logits [B, V] of joining sequences, using their kept keys and values if there are any.

        Equal texts are computed once, unless each has kept keys and values of its own.
        """
        texts = [(*sequence.prompt.token_ids, *sequence.token_ids) for sequence in sequences]
        kept = [self._kept.pop(sequence, None) for sequence in sequences]
        room = max(sequence.room for sequence in sequences)
        found = {(text, id(of)): of for text, of in zip(texts, kept, strict=True)}
        row_of = {key: row for row, key in enumerate(found)}
        rows = [row_of[text, id(of)] for text, of in zip(texts, kept, strict=True)]
        begun = [of for of in found.values() if of is not None]  # for all texts or for none
        return self._prefill(runner, [list(text) for text, _ in found], rows, room, begun)

    def _enter(self, sequences: list[Sequence]) -> None:
        """Assign sequences to the rows after the running ones, and draw their uniform numbers."""
        self._wave.rows += sequences
        new = [sequence for sequence in sequences if sequence not in self._uniforms]
        if new:
            longest = max(sequence.max_tokens for sequence in new)
            streams = uniform_streams([sequence.key for sequence in new], longest)
            self._uniforms.update(zip(new, streams.numpy(), strict=True))

    def _longest_room(self) -> int:
        return max(sequence.room for sequence in self._wave.rows)


ROWS = 64
"""Default number of sequences that run at the same time."""


class PortableEngine(RolloutEngine):
    """Samples from a transformers causal LM in place.

    Args:
        model: The model that is trained, PEFT-wrapped or not. Each call uses its current state and leaves its
            modes and parameters unchanged.
        pad_token_id: Any id of the vocabulary; it fills masked positions and is the only token of a
            completion whose first logits were not finite.
        max_sequences: Maximum number of sequences that run at the same time. Each needs memory for the keys
            and values of its prompt and of ``max_tokens`` tokens.
        kept_bytes: Maximum bytes of keys and values kept between turns and as prefixes.

    Raises:
        QeRLError: ``max_sequences`` is below 1, or the model cannot be sampled from.
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
        """See ``RolloutEngine.release``; the last session recomputes its keys and values if it goes on."""
        if (session := self._last.session) is not None:
            session.give_up()
        self._forget()

    def reset(self) -> None:
        """See ``RolloutEngine.reset``."""
        self._forget()

    def _forget(self) -> None:
        """Drop all stored prefixes."""
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
                if session.policy != policy:  # keys and values of its sequences mix both policies
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
        """Put the model into its rollout configuration for one call, and restore it for training."""
        base = self._base
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(self.model))
            if base._supports_attention_backend:  # other models compare the attention's name with "sdpa"
                stack.enter_context(grouped_decode(base.config))
            if norm_offsets:
                stack.enter_context(noisy_norms(self.model, norm_offsets))
            if self._packed and base.device.type == "cpu":
                stack.enter_context(dense_weights_kept(self.model))
            yield
