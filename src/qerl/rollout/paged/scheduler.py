"""Scheduling of sequences over batch rows and cache memory: plain Python, no tensors, no model.

Time is divided into rounds of a few decode steps. Before a round the scheduler gives every running sequence
the memory that the round can need, and admits waiting sequences into free rows. When memory runs short, it
preempts the running sequence that was started last: its memory is freed, its tokens are kept, and it moves to
the front of the queue to be prefilled again. Admission leaves memory free for some more rounds of the running
sequences, because a new sequence would otherwise take what they are about to need. After a round the
scheduler records what each row generated.

A sequence whose turn has ended leaves its row and keeps its memory while others append tokens to it, which
are prefilled behind the cached ones. When memory runs short, idle sequences lose theirs before any running
sequence is preempted: they are not decoding, and may never resume. `SequenceMemory` defines memory, and how
samples share that of their prompt.

A prompt is prefilled without its last token; each sequence decodes that token itself, into its own first
block. So prefill needs no sampling, and a prompt of one token needs no prefill. Neither does a prefix that
the memory still holds from an earlier sequence.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from qerl.errors import QeRLError
from qerl.rollout.paged.limits import PREFILL_TOKENS

if TYPE_CHECKING:  # the contract that sequences come from needs torch
    from collections.abc import Hashable

    from qerl.rollout.session import Prompt, Sequence


@dataclass(frozen=True)
class Pace:
    """Sizes of rounds, prefill passes and decode steps, which change the speed of a call and not its samples.

    The defaults are the fastest on an H100.

    Attributes:
        round_steps: Decode steps per round.
        spare_rounds: Rounds of memory that admission leaves free for the running sequences.
        small_rows: Rows up to which a decode step takes hardly longer than with one row; a step of at most
            this many rows is not replaced with a smaller one.
        prefill_tokens: Token counts that prefill passes are built for, ascending.
    """

    round_steps: int = 16
    spare_rounds: int = 4
    small_rows: int = 8
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS


@dataclass(frozen=True)
class Span:
    """Consecutive tokens to prefill.

    Attributes:
        token_ids: The tokens.
        position: Position of the first token.
        blocks: Blocks that keys and values are written to, by pool.
        prompt_blocks: Blocks of the prompt that precedes the tokens, by pool; empty for a prompt itself.
        prompt_tokens: Tokens read from ``prompt_blocks``; 0 for a prompt itself.
        start: Index of the first token in ``blocks``; the tokens before it are cached, and attended to.
    """

    token_ids: list[int]
    position: int
    blocks: dict[int, list[int]]
    prompt_blocks: dict[int, list[int]] = field(default_factory=dict)
    prompt_tokens: int = 0
    start: int = 0


@dataclass
class Round:
    """Plan of a round: preemptions, prefill and admissions before its decode steps.

    Attributes:
        preempted: Preempted sequences, by the row that each was in.
        prompts: Prompts that were just given memory and must be computed.
        copies: Blocks to copy once prompts are computed, see `SequenceMemory.copies`.
        admitted: Sequences that enter a row; those of their tokens that are not cached must be computed.
    """

    preempted: dict[int, Sequence] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    copies: dict[int, int | None] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)

    def prompt_spans(self) -> list[Span]:
        """Return the spans of prompts, to prefill before the sequences that read them."""
        return [
            Span(prompt.token_ids[prompt.found : -1], prompt.found, prompt.blocks, start=prompt.found)
            for prompt in self.prompts
            if prompt.cached_tokens > prompt.found
        ]

    def own_spans(self) -> list[Span]:
        """Return the spans of the admitted sequences' own tokens."""
        spans = []
        for sequence in self.admitted:
            if sequence.cached < sequence.own_tokens:
                prompt, start = sequence.prompt, sequence.cached
                seen = prompt.shared_tokens
                own = [*prompt.token_ids[seen:], *sequence.token_ids][: sequence.own_tokens]
                spans.append(Span(own[start:], seen + start, sequence.blocks, prompt.blocks, seen, start))
        return spans

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of new prompts that were not found in memory, and uncached own tokens of sequences."""
        own = sum(sequence.own_tokens - sequence.cached for sequence in self.admitted)
        return own + sum(len(prompt.token_ids) - prompt.found for prompt in self.prompts)


Amount = Any  # an int or Units, which add up and compare alike


class SequenceMemory(Protocol):
    """Bookkeeping of the memory in which a model keeps keys, values and states of sequences.

    Amounts are integers, or `qerl.rollout.paged.limits.Units` where there are several pools of memory, which
    add up and compare alike. The unit is a block (`qerl.rollout.paged.blocks`): a page of keys and values,
    or the state of one sequence, for mixers that carry one; every token overwrites a state, but not a page.
    The tensors are in `KVCache`.

    Attributes:
        count: Units in total.
        rewinds: True if a sequence can resume from any of its tokens, False if only from the last computed.
        policy: Name of the policy if computed prefixes are kept for later prompts, else None.
    """

    count: Amount
    rewinds: bool
    policy: Hashable | None

    @property
    def free(self) -> Amount:
        """Units that no sequence holds."""

    def check(self, prompt: Prompt, limit: int) -> None:
        """Raise if one sequence of a prompt, with ``limit`` tokens of its own, exceeds the whole memory.

        Raises:
            QeRLError: It does.
        """

    def held(self, sequence: Sequence) -> Amount:
        """Return the units that a sequence holds, without those of its prompt."""

    def missing(self, sequence: Sequence, steps: int) -> Amount:
        """Return the units that a sequence lacks for ``steps`` steps, at most up to its token limit."""

    def prompt_missing(self, sequence: Sequence) -> Amount:
        """Return the units that a sequence's prompt lacks; 0 if a sequence already holds the prompt."""

    def copy(self, sequence: Sequence) -> bool:
        """Give an entering sequence a share of its prompt's memory, unless it still has one.

        Returns:
            Whether that memory is new, so that the prompt must be computed first.
        """

    def copies(self, sequence: Sequence) -> dict[int, int | None]:
        """Return the blocks to copy for an entering sequence: own block -> the prompt's block.

        Empty if the sequence has cached tokens. The source is None where the prompt has no block because its
        last token is all of it.
        """

    def learn(self, sequence: Sequence) -> None:
        """Register what an ended sequence has computed, for later prompts with the same prefix."""

    def reserve(self, sequence: Sequence, steps: int) -> None:
        """Give a sequence the units that it lacks for ``steps`` steps; they must be free.

        Raises:
            QeRLError: They are not.
        """

    def give_up(self, sequence: Sequence) -> None:
        """Release everything that a sequence holds, including its share of its prompt's memory."""


class Scheduler:
    """Continuous batching over a fixed number of rows.

    Args:
        memory: Memory of the sequences' keys, values and states.
        rows: Maximum number of running sequences.
        pace: Steps per round, and rounds for which memory is left free.

    Attributes:
        waiting: Queued sequences, in the order in which they will enter.
        running: Sequences by row.
        idle: Sequences whose turn has ended and that were not finished, by index.
    """

    def __init__(self, memory: SequenceMemory, rows: int, pace: Pace) -> None:
        self.memory, self.rows, self.pace = memory, rows, pace
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.idle: dict[int, Sequence] = {}

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the new sequences that have room for tokens.

        Raises:
            QeRLError: One of the sequences would not fit in an empty cache; none is queued.
        """
        with_room = [sequence for sequence in sequences if sequence.room]
        for sequence in with_room:
            self.memory.check(sequence.prompt, sequence.max_tokens)
        self.waiting.extend(with_room)

    def resume(self, sequence: Sequence) -> None:
        """Queue an idle sequence for its next turn, ahead of all sequences that have no tokens yet."""
        del self.idle[sequence.index]
        sequence.generated = len(sequence.token_ids)
        begun = sum(1 for waiting in self.waiting if waiting.generated)
        self.waiting.insert(begun, sequence)

    def finish(self, sequence: Sequence) -> None:
        """Drop an idle sequence and release its memory; do nothing for one that never had room."""
        if self.idle.pop(sequence.index, None):
            self.memory.give_up(sequence)

    @property
    def present(self) -> list[Sequence]:
        """Running, waiting and idle sequences: all that were not finished."""
        return [*self.running.values(), *self.waiting, *self.idle.values()]

    @property
    def busy(self) -> bool:
        """True while any sequence is running or waiting."""
        return bool(self.waiting or self.running)

    def next_round(self) -> Round:
        """Choose the sequences of the next round and give them memory.

        Raises:
            QeRLError: No sequence fits, because other users of the GPU have taken the cache's memory.
        """
        planned = Round()
        self._grow_running(planned)
        if not planned.preempted:
            self._admit(planned)
        if not self.running:
            raise QeRLError(
                f"None of the {len(self.waiting)} waiting sequences fits the KV cache, which has "
                f"{self.memory.count} blocks; free GPU memory and start them again."
            )
        return planned

    def advance(
        self, generated: dict[int, int], ended: abc.Iterable[int], overrun: abc.Container[int] = ()
    ) -> None:
        """Record the results of a round.

        Sequences that ended must have their tokens by now. They keep their memory until they go on or are
        finished, or other sequences need it. One that overran releases it if the memory does not rewind.

        Args:
            generated: Number of tokens of each running sequence, by row.
            ended: Rows whose sequences ended their turn.
            overrun: The ended rows for which more tokens were computed than the sequence keeps.
        """
        for row, count in generated.items():
            self.running[row].generated = count
        for row in list(ended):
            sequence = self.running.pop(row)
            sequence.row, sequence.cached = None, sequence.own_tokens
            self.idle[sequence.index] = sequence
            self.memory.learn(sequence)
            if row in overrun and not self.memory.rewinds:
                self.memory.give_up(sequence)

    def suspend(self, memory: SequenceMemory) -> None:
        """Release all memory and continue with ``memory``; running sequences go to the front of the queue."""
        for sequence in sorted(self.running.values(), key=lambda s: -s.index):
            self._preempt(sequence)
        for sequence in (*self.idle.values(), *self.waiting):
            self.memory.give_up(sequence)
        self.memory = memory

    def compact(self, rows: int) -> dict[int, int]:
        """Move every running sequence into the first ``rows`` rows, which must be enough for them.

        Returns:
            The new row of each row that had a sequence.
        """
        free = iter([row for row in range(rows) if row not in self.running])
        moved = {row: row if row < rows else next(free) for row in sorted(self.running)}
        self.running = {moved[row]: sequence for row, sequence in self.running.items()}
        for row, sequence in self.running.items():
            sequence.row = row
        return moved

    def reclaim(self, entering: Sequence | None = None) -> bool:
        """Evict one sequence that is not running; it will be computed again.

        Idle sequences are evicted first, starting with the one started last. Waiting ones follow, from the
        end of the queue, but never for a sequence that enters beside running ones, as it can wait too.

        Returns:
            False if no such sequence holds memory.
        """
        held = [sequence for sequence in self.idle.values() if self.memory.held(sequence)]
        if not held and (entering is None or not self.running):
            held = [each for each in self.waiting if self.memory.held(each) and each is not entering][-1:]
        if held:
            self.memory.give_up(max(held, key=lambda sequence: sequence.index))
        return bool(held)

    def _grow_running(self, planned: Round) -> None:
        for sequence in sorted(self.running.values(), key=lambda s: s.index):
            while sequence.row is not None:
                missing = self._missing(sequence)
                while missing > self.memory.free and self.reclaim():
                    pass
                if missing <= self.memory.free:
                    self.memory.reserve(sequence, self.pace.round_steps)
                    break
                row, victim = max(self.running.items(), key=lambda item: item[1].index)
                self._preempt(victim)
                planned.preempted[row] = victim

    def _admit(self, planned: Round) -> None:
        if not self.waiting:
            return
        free_rows = [row for row in range(self.rows) if row not in self.running]
        ahead = 1 + self.pace.spare_rounds
        spare = sum(self._missing(sequence, ahead) for sequence in self.running.values())
        for row in free_rows:
            if not self.waiting:
                return
            sequence = self.waiting[0]
            if not self._make_room(sequence, spare):
                return
            self.waiting.popleft()
            if self.memory.copy(sequence):
                planned.prompts.append(sequence.prompt)
            self.memory.reserve(sequence, self.pace.round_steps)
            planned.copies |= self.memory.copies(sequence)
            sequence.cached = max(sequence.cached, sequence.prompt.tail)
            spare += self._missing(sequence, ahead)
            sequence.row = row
            self.running[row] = sequence
            planned.admitted.append(sequence)

    def _make_room(self, entering: Sequence, spare: Amount) -> bool:
        """Free the memory that a sequence lacks to enter, if it may enter now.

        Args:
            entering: The first waiting sequence.
            spare: Memory to leave for running sequences; memory of idle sequences counts as free.

        Returns:
            False if the sequence has to wait.
        """
        idle = sum(self.memory.held(sequence) for sequence in self.idle.values())
        if self.running and self._needed(entering) + spare > self.memory.free + idle:
            return False
        while self._needed(entering) > self.memory.free:
            if not self.reclaim(entering):
                return False
        return True

    def _needed(self, sequence: Sequence) -> Amount:
        """Return the memory that a waiting sequence and its prompt lack for the next round."""
        return self.memory.prompt_missing(sequence) + self._missing(sequence)

    def _missing(self, sequence: Sequence, rounds: int = 1) -> Amount:
        """Return the memory that a sequence lacks for the next ``rounds`` rounds."""
        return self.memory.missing(sequence, rounds * self.pace.round_steps)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the row and memory of a running sequence, and put it at the front of the queue."""
        assert sequence.row is not None
        del self.running[sequence.row]
        sequence.row = None
        self.memory.give_up(sequence)
        self.waiting.appendleft(sequence)
