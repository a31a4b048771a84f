"""Which sequences run in which rows, and which blocks they own: plain Python, no tensors, no model.

Time is cut into rounds of a few decode steps. Before a round the scheduler admits waiting sequences into free
rows, gives every running sequence the blocks that the round can need, and, when there are not enough,
preempts the sequence admitted last: its blocks are freed, its tokens are kept, and it waits in front of all
others to be prefilled again. Where memory is short, whoever enters takes what those that run are about to
need; so room for some of their rounds is left free at admission. After a round the scheduler is told what
each row generated.

A sequence whose turn has ended leaves its row and keeps its blocks while others write to it. What it is given
is prefilled behind what is cached. Whoever lacks blocks takes them from such sequences before any that runs
is preempted: they are not decoding, and may never go on.

A prompt is prefilled without its last token; each sequence decodes that token itself, into its own first
block. So prefill needs no sampling, and a prompt of one token needs no prefill.
"""

from collections import abc, deque
from dataclasses import dataclass, field

from qerl.errors import QeRLError
from qerl.rollout import sequence as common
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.pace import Pace


@dataclass(eq=False)
class Prompt(common.Prompt):
    """A prompt and, while any of its sequences holds keys and values, its blocks.

    Attributes:
        blocks: Blocks of its keys and values, shared by its sequences; None while none of them holds any.
        readers: Sequences that hold them.
    """

    blocks: list[int] | None = None
    readers: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens in the blocks: all but the last, which each sequence decodes itself."""
        return len(self.token_ids) - 1


@dataclass(eq=False)
class Sequence(common.Sequence):
    """One completion in the making, from the first plan to its last token.

    What it has (`token_ids` and the rest) is read when it leaves its row; the tokens of one that has stops,
    after each round.

    Attributes:
        prompt: The prompt that it continues.
        generated: Tokens that it has, drawn or written, as the host knows it.
        cached: Of its own tokens, which begin with the prompt's last, those whose keys and values its blocks
            held when it left its row.
        blocks: Blocks of its own tokens, which it may keep while others write.
        row: Row of the batch while it runs.
    """

    prompt: Prompt
    generated: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int | None = None

    @property
    def last_token(self) -> int:
        """The token that the next decode step reads."""
        return self.token_ids[-1] if self.token_ids else self.prompt.token_ids[-1]

    def own_tokens_after(self, steps: int) -> int:
        """Tokens that its own blocks must hold after so many more steps, and for the token after them.

        The prompt's last token and all of its own are cached, except the very last.
        """
        return min(self.generated + steps + 1, self.max_tokens)


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens whose keys and values are to be computed.

    Attributes:
        token_ids: The tokens.
        position: Position of the first token.
        blocks: Blocks that take keys and values.
        prompt_blocks: Blocks of a prompt that all of the tokens see in full.
        prompt_tokens: Tokens in those; 0 for a prompt itself.
        start: Place in the blocks where the first token goes; those before it are computed, and seen.
    """

    token_ids: list[int]
    position: int
    blocks: list[int]
    prompt_blocks: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    start: int = 0


@dataclass
class Round:
    """What to do before the next decode steps.

    Attributes:
        preempted: Sequences that lost their blocks, by the row that each was in.
        prompts: Prompts whose blocks were just given out and must be computed.
        admitted: Sequences that enter a row; of what they have, that which is not cached must be computed.
    """

    preempted: dict[int, Sequence] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def spans(self) -> list[Span]:
        """What to prefill, prompts before the sequences that read them."""
        spans = [
            Span(prompt.token_ids[:-1], 0, prompt.blocks or [])
            for prompt in self.prompts
            if prompt.cached_tokens
        ]
        for sequence in self.admitted:
            if sequence.cached < sequence.generated:
                prompt, start = sequence.prompt, sequence.cached
                own = [prompt.token_ids[-1], *sequence.token_ids[:-1]]
                seen = prompt.cached_tokens
                spans.append(
                    Span(own[start:], seen + start, sequence.blocks, prompt.blocks or [], seen, start)
                )
        return spans

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts that enter, and those of sequences that are computed otherwise than as drawn."""
        own = sum(sequence.generated - sequence.cached for sequence in self.admitted)
        return own + sum(len(prompt.token_ids) for prompt in self.prompts)


class Scheduler:
    """Continuous batching over a fixed number of rows.

    Args:
        blocks: The cache's blocks.
        rows: Sequences that run side by side.
        pace: Length of a round, and the rounds for which room is left.

    Attributes:
        waiting: Sequences without a row, in the order in which they will enter.
        running: Sequences by row.
        idle: Sequences whose turn has ended and that were not finished, by index.
    """

    def __init__(self, blocks: BlockManager, rows: int, pace: Pace) -> None:
        self.blocks, self.rows, self.pace = blocks, rows, pace
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.idle: dict[int, Sequence] = {}
        self._prompts = self._sequences = 0

    def add(
        self, prompts: abc.Sequence[abc.Sequence[int]], samples: int, limits: abc.Sequence[int]
    ) -> list[Sequence]:
        """Make ``samples`` sequences for each prompt, numbered on, and queue those that have room.

        Args:
            prompts: Token ids of each.
            samples: Sequences for each.
            limits: Tokens that each sequence may have, prompts in order, the samples of a prompt next to each
                other.

        Raises:
            QeRLError: A prompt whose one sequence would not fit an empty cache.
        """
        added: list[Sequence] = []
        for token_ids in prompts:
            prompt = Prompt(self._prompts + len(added) // samples, list(token_ids))
            first, own = self._sequences + len(added), limits[len(added) : len(added) + samples]
            if max(own) > 0:
                self._check_fits(prompt, max(own))
            added += [Sequence(first + i, prompt, i, limit) for i, limit in enumerate(own)]
        self._prompts, self._sequences = self._prompts + len(prompts), self._sequences + len(added)
        self.waiting.extend(sequence for sequence in added if sequence.room)
        return added

    def resume(self, sequence: Sequence) -> None:
        """Queue an idle sequence to which others have written, before all that have not begun."""
        del self.idle[sequence.index]
        sequence.generated = len(sequence.token_ids)
        begun = sum(1 for waiting in self.waiting if waiting.generated)
        self.waiting.insert(begun, sequence)

    def finish(self, sequence: Sequence) -> None:
        """Let go of an idle sequence and of its blocks; one that never had room is none."""
        if self.idle.pop(sequence.index, None):
            self._give_up(sequence)

    @property
    def present(self) -> list[Sequence]:
        """Sequences that run, wait or are idle: all but those that were finished."""
        return [*self.running.values(), *self.waiting, *self.idle.values()]

    @property
    def busy(self) -> bool:
        """True while any sequence is to be decoded."""
        return bool(self.waiting or self.running)

    def next_round(self) -> Round:
        """Decide who runs in the next round, and give out its blocks.

        Raises:
            QeRLError: Nobody can, because the cache went to others.
        """
        planned = Round()
        self._grow_running(planned)
        if not planned.preempted:
            self._admit(planned)
        if not self.running:
            raise QeRLError(
                f"The cache has {self.blocks.count} blocks, and none of the {len(self.waiting)} "
                "sequences that wait fits there: free GPU memory and start them again."
            )
        return planned

    def advance(self, generated: dict[int, int], ended: abc.Iterable[int]) -> None:
        """Record a round: tokens that sequences have by row, and the rows whose sequences ended their turn.

        Those keep their blocks until they go on or are finished, or others need the room.
        """
        for row, count in generated.items():
            self.running[row].generated = count
        for row in list(ended):
            sequence = self.running.pop(row)
            sequence.row, sequence.cached = None, sequence.generated
            self.idle[sequence.index] = sequence

    def suspend(self, blocks: BlockManager) -> None:
        """Give up all keys and values, and go on with other blocks; those that run wait in front of all."""
        for sequence in sorted(self.running.values(), key=lambda s: -s.index):
            self._preempt(sequence)
        for sequence in (*self.idle.values(), *self.waiting):
            self._give_up(sequence)
        self.blocks = blocks

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
        """Take the blocks of one sequence that does not run; it will be computed again.

        Idle ones come first, the latest started before all. Those that wait come last, and never for a
        sequence that enters beside others, which can wait as well.

        Returns:
            False if there is none.
        """
        held = [sequence for sequence in self.idle.values() if sequence.blocks]
        if not held and (entering is None or not self.running):
            held = [each for each in self.waiting if each.blocks and each is not entering][-1:]
        if held:
            self._give_up(max(held, key=lambda sequence: sequence.index))
        return bool(held)

    def _check_fits(self, prompt: Prompt, limit: int) -> None:
        needed = self.blocks.blocks_for(prompt.cached_tokens) + self.blocks.blocks_for(limit)
        if needed > self.blocks.count:
            raise QeRLError(
                f"Prompt {prompt.number} has {len(prompt.token_ids)} tokens and with {limit} new ones needs "
                f"{needed} cache blocks of {self.blocks.block_tokens} tokens; the cache has "
                f"{self.blocks.count}: free GPU memory, or lower max_tokens."
            )

    def _grow_running(self, planned: Round) -> None:
        for sequence in sorted(self.running.values(), key=lambda s: s.index):
            while sequence.row is not None:
                missing = self._missing(sequence)
                while missing > self.blocks.free and self.reclaim():
                    pass
                if missing <= self.blocks.free:
                    sequence.blocks += self.blocks.take(missing)
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
            self._take_prompt(sequence, planned)
            sequence.blocks += self.blocks.take(self._missing(sequence))
            spare += self._missing(sequence, ahead)
            sequence.row = row
            self.running[row] = sequence
            planned.admitted.append(sequence)

    def _make_room(self, entering: Sequence, spare: int) -> bool:
        """Have the blocks free that a sequence lacks to enter.

        Args:
            entering: The first that waits.
            spare: Blocks to leave for those that run; what idle sequences hold counts as left.

        Returns:
            False if it has to wait.
        """
        idle = sum(len(sequence.blocks) for sequence in self.idle.values())
        if self.running and self._needed(entering) + spare > self.blocks.free + idle:
            return False
        while self._needed(entering) > self.blocks.free:
            if not self.reclaim(entering):
                return False
        return True

    def _take_prompt(self, sequence: Sequence, planned: Round) -> None:
        """Make an entering sequence a reader of its prompt, unless it has stayed one."""
        prompt = sequence.prompt
        if sequence.blocks:
            return
        if prompt.blocks is None:
            prompt.blocks = self.blocks.take(self.blocks.blocks_for(prompt.cached_tokens))
            planned.prompts.append(prompt)
        else:
            self.blocks.share(prompt.blocks)
        prompt.readers += 1

    def _needed(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence and its prompt lack for the next round."""
        prompt = sequence.prompt
        shared = 0 if prompt.blocks is not None else self.blocks.blocks_for(prompt.cached_tokens)
        return shared + self._missing(sequence)

    def _missing(self, sequence: Sequence, rounds: int = 1) -> int:
        """Blocks that a sequence lacks for so many rounds; it never needs more than its last token does."""
        needed = self.blocks.blocks_for(sequence.own_tokens_after(rounds * self.pace.round_steps))
        return max(0, needed - len(sequence.blocks))

    def _preempt(self, sequence: Sequence) -> None:
        """Take row and blocks of a running sequence, which waits in front of all others."""
        assert sequence.row is not None
        del self.running[sequence.row]
        sequence.row = None
        self._give_up(sequence)
        self.waiting.appendleft(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Release the blocks that a sequence holds, its share of its prompt's included."""
        prompt = sequence.prompt
        if sequence.blocks:
            assert prompt.blocks is not None
            self.blocks.release(sequence.blocks)
            self.blocks.release(prompt.blocks)
            prompt.readers -= 1
            if prompt.readers == 0:
                prompt.blocks = None
        sequence.blocks, sequence.cached = [], 0
