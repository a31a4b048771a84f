"""Which sequences run in which rows, and who has memory: plain Python, no tensors, no model.

Time is cut into rounds of a few decode steps. Before a round the scheduler admits waiting sequences into free
rows, gives every running sequence the memory that the round can need, and, when there is not enough,
preempts the sequence admitted last: its memory is freed, its tokens are kept, and it waits in front of all
others to be prefilled again. Where memory is short, whoever enters takes what those that run are about to
need; so room for some of their rounds is left free at admission. After a round the scheduler is told what
each row generated.

A sequence whose turn has ended leaves its row and keeps its memory while others write to it. What it is given
is prefilled behind what is cached. Whoever lacks memory takes it from such sequences before any that runs
is preempted: they are not decoding, and may never go on. What memory is, and how samples have their prompt's,
`SequenceMemory` says.

A prompt is prefilled without its last token; each sequence decodes that token itself, into its own first
block. So prefill needs no sampling, and a prompt of one token needs no prefill. Nor does what memory finds of
a prompt, because others that ended have computed it.
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
    """How a call is cut into rounds, passes and steps: lengths that change how fast it runs, not what it
    samples. The fastest on an H100 are the defaults.

    Attributes:
        round_steps: Decode steps between two plans of the scheduler.
        spare_rounds: Rounds whose blocks admission leaves free for the sequences that run.
        small_rows: Rows up to which a decode step hardly takes longer than with one; a step of so many rows
            is not exchanged for a smaller one.
        prefill_tokens: Tokens that a prefill pass is made for, ascending.
    """

    round_steps: int = 16
    spare_rounds: int = 4
    small_rows: int = 8
    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens whose keys and values are to be computed.

    Attributes:
        token_ids: The tokens.
        position: Position of the first token.
        blocks: Blocks that take keys and values, by pool.
        prompt_blocks: Blocks of a prompt that stands before all of the tokens.
        prompt_tokens: Tokens in those; 0 for a prompt itself.
        start: Place in the blocks where the first token goes; those before it are computed, and seen.
    """

    token_ids: list[int]
    position: int
    blocks: dict[int, list[int]]
    prompt_blocks: dict[int, list[int]] = field(default_factory=dict)
    prompt_tokens: int = 0
    start: int = 0


@dataclass
class Round:
    """What to do before the next decode steps.

    Attributes:
        preempted: Sequences that lost their memory, by the row that each was in.
        prompts: Prompts whose memory was just given out and must be computed.
        copies: Blocks that begin as copies of others once prompts are computed, see `SequenceMemory.copies`.
        admitted: Sequences that enter a row; of what they have, that which is not cached must be computed.
    """

    preempted: dict[int, Sequence] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    copies: dict[int, int | None] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)

    def prompt_spans(self) -> list[Span]:
        """What to prefill of prompts, before the sequences that read them."""
        return [
            Span(prompt.token_ids[prompt.found : -1], prompt.found, prompt.blocks, start=prompt.found)
            for prompt in self.prompts
            if prompt.cached_tokens > prompt.found
        ]

    def own_spans(self) -> list[Span]:
        """What to prefill of sequences."""
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
        """Tokens of prompts that enter, and those of sequences that are computed otherwise than as drawn."""
        own = sum(sequence.own_tokens - sequence.cached for sequence in self.admitted)
        return own + sum(len(prompt.token_ids) - prompt.found for prompt in self.prompts)


Amount = Any  # an int, or Units: what adds up and compares


class SequenceMemory(Protocol):
    """Who holds how much of the memory in which a model keeps what it has read of sequences.

    Amounts are numbers, or `qerl.rollout.paged.limits.Units` where there are several kinds of memory, which
    add up and compare alike. Keys and values in pages are one kind (`qerl.rollout.paged.blocks`), whose unit
    is a page. The state of a mixer that carries one is another, whose unit is the state of one sequence; it
    is overwritten by every token, and a page is not. The numbers lie in `KVCache`.

    Attributes:
        count: Units in all.
        rewinds: True if a sequence can go on from any of its tokens, False if from the last one alone.
        policy: Name of the policy, if what sequences have computed is kept for prompts that begin alike.
    """

    count: Amount
    rewinds: bool
    policy: Hashable | None

    @property
    def free(self) -> Amount:
        """Units that nobody holds."""

    def check(self, prompt: Prompt, limit: int) -> None:
        """Raise for a prompt of which one sequence with so many tokens of its own exceeds all memory.

        Raises:
            QeRLError: It does.
        """

    def held(self, sequence: Sequence) -> Amount:
        """Units that a sequence holds beside its prompt's."""

    def missing(self, sequence: Sequence, steps: int) -> Amount:
        """Units that a sequence lacks for so many steps; it never needs more than its last token does."""

    def prompt_missing(self, sequence: Sequence) -> Amount:
        """Units that the prompt of a sequence lacks; 0 where another sequence has it there."""

    def copy(self, sequence: Sequence) -> bool:
        """Let an entering sequence have what its prompt left, unless it has it still.

        Returns:
            Whether the prompt must be computed first.
        """

    def copies(self, sequence: Sequence) -> dict[int, int | None]:
        """Blocks of a sequence that enters with nothing computed whose content must be copied from its
        prompt's, by those; from None where the prompt has none because all of it is the last token."""

    def learn(self, sequence: Sequence) -> None:
        """Note what a sequence whose turn has ended has computed, for prompts that begin alike."""

    def reserve(self, sequence: Sequence, steps: int) -> None:
        """Give a sequence what it lacks for so many steps, which must be free.

        Raises:
            QeRLError: It is not.
        """

    def give_up(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds, its share of its prompt's included."""


class Scheduler:
    """Continuous batching over a fixed number of rows.

    Args:
        memory: What sequences hold keys and values in.
        rows: Sequences that run side by side.
        pace: Length of a round, and the rounds for which room is left.

    Attributes:
        waiting: Sequences without a row, in the order in which they will enter.
        running: Sequences by row.
        idle: Sequences whose turn has ended and that were not finished, by index.
    """

    def __init__(self, memory: SequenceMemory, rows: int, pace: Pace) -> None:
        self.memory, self.rows, self.pace = memory, rows, pace
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.idle: dict[int, Sequence] = {}

    def add(self, sequences: list[Sequence]) -> None:
        """Queue those of new sequences that have room.

        Raises:
            QeRLError: A prompt whose one sequence would not fit an empty cache; none is queued.
        """
        with_room = [sequence for sequence in sequences if sequence.room]
        for sequence in with_room:
            self.memory.check(sequence.prompt, sequence.max_tokens)
        self.waiting.extend(with_room)

    def resume(self, sequence: Sequence) -> None:
        """Queue an idle sequence to which others have written, before all that have not begun."""
        del self.idle[sequence.index]
        sequence.generated = len(sequence.token_ids)
        begun = sum(1 for waiting in self.waiting if waiting.generated)
        self.waiting.insert(begun, sequence)

    def finish(self, sequence: Sequence) -> None:
        """Let go of an idle sequence and of its memory; one that never had room is none."""
        if self.idle.pop(sequence.index, None):
            self.memory.give_up(sequence)

    @property
    def present(self) -> list[Sequence]:
        """Sequences that run, wait or are idle: all but those that were finished."""
        return [*self.running.values(), *self.waiting, *self.idle.values()]

    @property
    def busy(self) -> bool:
        """True while any sequence is to be decoded."""
        return bool(self.waiting or self.running)

    def next_round(self) -> Round:
        """Decide who runs in the next round, and give out its memory.

        Raises:
            QeRLError: Nobody can, because the cache went to others.
        """
        planned = Round()
        self._grow_running(planned)
        if not planned.preempted:
            self._admit(planned)
        if not self.running:
            raise QeRLError(
                f"The cache has {self.memory.count} blocks, and none of the {len(self.waiting)} "
                "sequences that wait fits there: free GPU memory and start them again."
            )
        return planned

    def advance(
        self, generated: dict[int, int], ended: abc.Iterable[int], overrun: abc.Container[int] = ()
    ) -> None:
        """Record a round.

        Sequences that ended, which have their tokens by then, keep their memory until they go on or are
        finished, or others need the room. One that overran gives it up where memory does not rewind.

        Args:
            generated: Tokens that sequences have, by row.
            ended: Rows whose sequences ended their turn.
            overrun: Those of them of which more tokens were computed than the sequences have.
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
        """Give up all memory, and go on with other; those that run wait in front of all."""
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
        """Take the memory of one sequence that does not run; it will be computed again.

        Idle ones come first, the latest started before all. Those that wait come last, and never for a
        sequence that enters beside others, which can wait as well.

        Returns:
            False if there is none.
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
        """Have the memory free that a sequence lacks to enter.

        Args:
            entering: The first that waits.
            spare: Memory to leave for those that run; what idle sequences hold counts as left.

        Returns:
            False if it has to wait.
        """
        idle = sum(self.memory.held(sequence) for sequence in self.idle.values())
        if self.running and self._needed(entering) + spare > self.memory.free + idle:
            return False
        while self._needed(entering) > self.memory.free:
            if not self.reclaim(entering):
                return False
        return True

    def _needed(self, sequence: Sequence) -> Amount:
        """Memory that a waiting sequence and its prompt lack for the next round."""
        return self.memory.prompt_missing(sequence) + self._missing(sequence)

    def _missing(self, sequence: Sequence, rounds: int = 1) -> Amount:
        """Memory that a sequence lacks for so many rounds."""
        return self.memory.missing(sequence, rounds * self.pace.round_steps)

    def _preempt(self, sequence: Sequence) -> None:
        """Take row and memory of a running sequence, which waits in front of all others."""
        assert sequence.row is not None
        del self.running[sequence.row]
        sequence.row = None
        self.memory.give_up(sequence)
        self.waiting.appendleft(sequence)
