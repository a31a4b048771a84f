"""Which sequences run in which rows, and which blocks they own: plain Python, no tensors, no model.

Time is cut into rounds of a few decode steps. Before a round the scheduler is asked to plan: it admits
waiting sequences into free rows, gives every running sequence the blocks that the round can need, and, when
there are not enough, preempts the sequence admitted last: its blocks are freed, its tokens are kept, and it
waits in front of all others to be prefilled again. Where memory is short, whoever enters takes what those
that run are about to need; so room for some rounds of theirs is left free at admission. After a round it is
told what each row generated.

A prompt is prefilled without its last token; each sample decodes that token itself, into its own first block.
So prefill needs no sampling, and a prompt of one token needs no prefill.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qerl.errors import QeRLError
from qerl.rollout.paged.blocks import BlockManager

_SPARE_ROUNDS = 4  # whose blocks admission leaves free


@dataclass
class Prompt:
    """A prompt and, while any of its samples runs, its blocks."""

    token_ids: list[int]
    blocks: list[int] | None = None
    readers: int = 0

    @property
    def cached_tokens(self) -> int:
        return len(self.token_ids) - 1


@dataclass(eq=False)
class Sample:
    """One completion in the making.

    Attributes:
        index: Position in the call's result.
        prompt: What it continues.
        generated: Tokens so far, as the host knows them.
        blocks: Own blocks while it runs.
        row: Place in the batch while it runs.
    """

    index: int
    prompt: Prompt
    max_tokens: int
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int | None = None

    def own_tokens_after(self, steps: int) -> int:
        """Own places needed for so many more steps and the token after them.

        The prompt's last token and all generated ones are cached, except the very last.
        """
        return min(self.generated + steps + 1, self.max_tokens)


@dataclass
class Plan:
    """What to do before a round.

    Attributes:
        prefill_prompts: Prompts whose blocks were just given out and must be computed.
        admitted: Sequences that enter a row; those that have generated tokens need these computed again.
        preempted: Sequences that lost their blocks, with the row that each was in.
    """

    prefill_prompts: list[Prompt]
    admitted: list[Sample]
    preempted: list[tuple[Sample, int]]


class Scheduler:
    """Continuous batching over a fixed number of rows.

    Args:
        blocks: The cache.
        rows: Sequences that run side by side.
        round_steps: Decode steps between two plans.
    """

    def __init__(self, blocks: BlockManager, rows: int, round_steps: int) -> None:
        self.blocks, self.rows, self.round_steps = blocks, rows, round_steps
        self.waiting: deque[Sample] = deque()
        self.running: dict[int, Sample] = {}

    def add(self, prompts: Sequence[Sequence[int]], samples: int, max_tokens: int) -> list[Sample]:
        """Queues ``samples`` sequences for each prompt.

        Raises:
            QeRLError: A prompt whose one sequence would not fit an empty cache.
        """
        added = []
        for number, token_ids in enumerate(prompts):
            prompt = Prompt(list(token_ids))
            needed = self.blocks.blocks_for(prompt.cached_tokens) + self.blocks.blocks_for(max_tokens)
            if needed > self.blocks.count:
                raise QeRLError(
                    f"Prompt {number} has {len(token_ids)} tokens and with {max_tokens} new ones needs "
                    f"{needed} cache blocks of {self.blocks.block_tokens} tokens; the cache has "
                    f"{self.blocks.count}: raise its share of GPU memory, or lower max_tokens."
                )
            added += [Sample(number * samples + i, prompt, max_tokens) for i in range(samples)]
        self.waiting.extend(added)
        return added

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def plan(self) -> Plan:
        """Prepares the next round."""
        plan = Plan([], [], [])
        self._grow_running(plan)
        if not plan.preempted:
            self._admit(plan)
        return plan

    def advance(self, generated: dict[int, int], finished: Iterable[int]) -> None:
        """Records a round: tokens generated so far by row, and the rows that have finished."""
        for row, count in generated.items():
            self.running[row].generated = count
        for row in list(finished):
            self._leave(self.running[row])

    def compact(self, rows: int) -> dict[int, int]:
        """Moves every running sequence into the first ``rows`` rows, which must be enough for them.

        Returns:
            The new row of each row that had a sequence.
        """
        free = iter([row for row in range(rows) if row not in self.running])
        moved = {row: row if row < rows else next(free) for row in sorted(self.running)}
        self.running = {moved[row]: sequence for row, sequence in self.running.items()}
        for row, sequence in self.running.items():
            sequence.row = row
        return moved

    def _grow_running(self, plan: Plan) -> None:
        for sequence in sorted(self.running.values(), key=lambda s: s.index):
            while sequence.row is not None:
                missing = self._missing(sequence)
                if missing <= self.blocks.free:
                    sequence.blocks += self.blocks.take(missing)
                    break
                row, victim = max(self.running.items(), key=lambda item: item[1].index)
                self._leave(victim)
                self.waiting.appendleft(victim)
                plan.preempted.append((victim, row))

    def _admit(self, plan: Plan) -> None:
        free_rows = [row for row in range(self.rows) if row not in self.running]
        spare = sum(self._missing(sequence, 1 + _SPARE_ROUNDS) for sequence in self.running.values())
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
                plan.prefill_prompts.append(prompt)
            else:
                self.blocks.share(prompt.blocks)
            prompt.readers += 1
            sequence.blocks = self.blocks.take(self._missing(sequence))
            spare += self._missing(sequence, 1 + _SPARE_ROUNDS)
            sequence.row = row
            self.running[row] = sequence
            plan.admitted.append(sequence)

    def _missing(self, sequence: Sample, rounds: int = 1) -> int:
        """Blocks that a sequence lacks for so many rounds; it never needs more than its last token does."""
        needed = self.blocks.blocks_for(sequence.own_tokens_after(rounds * self.round_steps))
        return max(0, needed - len(sequence.blocks))

    def _leave(self, sequence: Sample) -> None:
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
