"""Which sequences run in which rows, and which blocks they own: plain Python, no tensors, no model.

Time is cut into rounds of a few decode steps. Before a round the scheduler admits waiting sequences into free
rows, gives every running sequence the blocks that the round can need, and, when there are not enough,
preempts the sequence admitted last: its blocks are freed, its tokens are kept, and it waits in front of all
others to be prefilled again. Where memory is short, whoever enters takes what those that run are about to
need; so room for some of their rounds is left free at admission. After a round the scheduler is told what
each row generated.

A prompt is prefilled without its last token; each sequence decodes that token itself, into its own first
block. So prefill needs no sampling, and a prompt of one token needs no prefill.
"""

from collections import abc, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qerl.errors import QeRLError
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.pace import Pace

if TYPE_CHECKING:  # the contract of engines imports torch
    from qerl.rollout.engine import FinishReason


@dataclass
class Prompt:
    """A prompt and, while any of its sequences runs, its blocks.

    Attributes:
        number: Position in the call, from 0.
        token_ids: All its tokens.
        blocks: Blocks of its keys and values, shared by its sequences; None while none of them runs.
        readers: Sequences that run.
    """

    number: int
    token_ids: list[int]
    blocks: list[int] | None = None
    readers: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens in the blocks: all but the last, which each sequence decodes itself."""
        return len(self.token_ids) - 1


@dataclass(eq=False)
class Sequence:
    """One completion in the making, from the call's first plan to its last token.

    Attributes:
        index: Position in the call's result.
        prompt: The prompt that it continues.
        sample: Number among the prompt's sequences, from 0.
        max_tokens: Tokens that it may generate.
        generated: Tokens generated so far, as the host knows it.
        blocks: Blocks of its own tokens while it runs.
        row: Row of the batch while it runs.
        token_ids, logprobs, entropies: What it generated, read when it leaves its row.
        finish_reason: Why it ended, once it has.
    """

    index: int
    prompt: Prompt
    sample: int
    max_tokens: int
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish_reason: "FinishReason" = "length"

    @property
    def last_token(self) -> int:
        """The token that the next decode step reads."""
        return self.token_ids[-1] if self.token_ids else self.prompt.token_ids[-1]

    def own_tokens_after(self, steps: int) -> int:
        """Tokens that its own blocks must hold after so many more steps, and for the token after them.

        The prompt's last token and all generated ones are cached, except the very last.
        """
        return min(self.generated + steps + 1, self.max_tokens)


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens whose keys and values are to be computed.

    Attributes:
        token_ids: The tokens.
        position: Position of the first token.
        blocks: Blocks that take keys and values, from the first place of the first block on.
        prompt_blocks: Blocks of a prompt that all of the tokens see in full.
        prompt_tokens: Tokens in those; 0 for a prompt itself.
    """

    token_ids: list[int]
    position: int
    blocks: list[int]
    prompt_blocks: list[int] = field(default_factory=list)
    prompt_tokens: int = 0


@dataclass
class Round:
    """What to do before the next decode steps.

    Attributes:
        preempted: Sequences that lost their blocks, by the row that each was in.
        prompts: Prompts whose blocks were just given out and must be computed.
        admitted: Sequences that enter a row; those that have generated tokens need these computed again.
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
            if sequence.generated:
                prompt = sequence.prompt
                known = [prompt.token_ids[-1], *sequence.token_ids[:-1]]
                cached = prompt.cached_tokens
                spans.append(Span(known, cached, sequence.blocks, prompt.blocks or [], cached))
        return spans


class Scheduler:
    """Continuous batching over a fixed number of rows.

    Args:
        blocks: The cache's blocks.
        rows: Sequences that run side by side.
        pace: Length of a round, and the rounds for which room is left.

    Attributes:
        waiting: Sequences without a row, in the order in which they will enter.
        running: Sequences by row.
    """

    def __init__(self, blocks: BlockManager, rows: int, pace: Pace) -> None:
        self.blocks, self.rows, self.pace = blocks, rows, pace
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}

    def add(self, prompts: abc.Sequence[abc.Sequence[int]], samples: int, max_tokens: int) -> list[Sequence]:
        """Queue ``samples`` sequences for each prompt.

        Raises:
            QeRLError: A prompt whose one sequence would not fit an empty cache.
        """
        added: list[Sequence] = []
        for number, token_ids in enumerate(prompts):
            prompt = Prompt(number, list(token_ids))
            needed = self.blocks.blocks_for(prompt.cached_tokens) + self.blocks.blocks_for(max_tokens)
            if needed > self.blocks.count:
                raise QeRLError(
                    f"Prompt {number} has {len(token_ids)} tokens and with {max_tokens} new ones needs "
                    f"{needed} cache blocks of {self.blocks.block_tokens} tokens; the cache has "
                    f"{self.blocks.count}: free GPU memory, or lower max_tokens."
                )
            added += [Sequence(number * samples + i, prompt, i, max_tokens) for i in range(samples)]
        self.waiting.extend(added)
        return added

    @property
    def busy(self) -> bool:
        """True while any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def next_round(self) -> Round:
        """Decide who runs in the next round, and give out its blocks."""
        planned = Round()
        self._grow_running(planned)
        if not planned.preempted:
            self._admit(planned)
        return planned

    def advance(self, generated: dict[int, int], finished: abc.Iterable[int]) -> None:
        """Record a round: tokens generated so far by row, and the rows that have finished."""
        for row, count in generated.items():
            self.running[row].generated = count
        for row in list(finished):
            self._leave(self.running[row])

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

    def _grow_running(self, planned: Round) -> None:
        for sequence in sorted(self.running.values(), key=lambda s: s.index):
            while sequence.row is not None:
                missing = self._missing(sequence)
                if missing <= self.blocks.free:
                    sequence.blocks += self.blocks.take(missing)
                    break
                row, victim = max(self.running.items(), key=lambda item: item[1].index)
                self._leave(victim)
                self.waiting.appendleft(victim)
                planned.preempted[row] = victim

    def _admit(self, planned: Round) -> None:
        free_rows = [row for row in range(self.rows) if row not in self.running]
        ahead = 1 + self.pace.spare_rounds
        spare = sum(self._missing(sequence, ahead) for sequence in self.running.values())
        for row in free_rows:
            if not self.waiting:
                return
            sequence = self.waiting[0]
            prompt = sequence.prompt
            shared = 0 if prompt.blocks is not None else self.blocks.blocks_for(prompt.cached_tokens)
            if shared + self._missing(sequence) + spare > self.blocks.free:
                return
            self.waiting.popleft()
            if prompt.blocks is None:
                prompt.blocks = self.blocks.take(shared)
                planned.prompts.append(prompt)
            else:
                self.blocks.share(prompt.blocks)
            prompt.readers += 1
            sequence.blocks = self.blocks.take(self._missing(sequence))
            spare += self._missing(sequence, ahead)
            sequence.row = row
            self.running[row] = sequence
            planned.admitted.append(sequence)

    def _missing(self, sequence: Sequence, rounds: int = 1) -> int:
        """Blocks that a sequence lacks for so many rounds; it never needs more than its last token does."""
        needed = self.blocks.blocks_for(sequence.own_tokens_after(rounds * self.pace.round_steps))
        return max(0, needed - len(sequence.blocks))

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        del self.running[sequence.row]
        self.blocks.release(sequence.blocks)
        prompt = sequence.prompt
        assert prompt.blocks is not None
        self.blocks.release(prompt.blocks)
        prompt.readers -= 1
        if prompt.readers == 0:
            prompt.blocks = None
        sequence.blocks, sequence.row = [], None
