"""Which blocks of the KV cache are free, and who holds the others: plain Python, no tensors.

A block holds the keys and values of 64 tokens, in all layers of a pool (`qerl.rollout.paged.limits`), or the
state of one sequence. A prompt's blocks are held once by each sequence that reads them, so the group shares
them and the last to finish frees them. A sequence's own tokens start in a fresh block even where the prompt's
last block has room: nothing is ever copied or written to while shared, at the price of less than one block
per prompt.

A state is a block that holds any number of tokens. It is overwritten with every one, so it cannot be shared
with a sequence that goes on: whoever enters has the prompt's copied (`copies`), and what was computed beyond
a sequence's end (`rewinds`) is computed again from there.

In a pool with a window, blocks that no token to come sees are given back, and stand in tables as `GONE`.
What is longer than window and pass of prefill together never has all its blocks at once: those that a pass
has left behind are listed again for the tokens of a later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from qerl.errors import QeRLError
from qerl.rollout.paged.limits import Pool, Units, window_blocks

if TYPE_CHECKING:  # the contract that sequences come from needs torch
    from qerl.rollout.session import Prompt, Sequence

GONE = -1
"""In a table, a block that was given back."""

_ANY_NUMBER = 1 << 62
"""Tokens that a state has room for."""


class BlockManager:
    """Reference-counted blocks of one pool; a `qerl.rollout.paged.scheduler.SequenceMemory`.

    Args:
        count: Number of blocks in the pool.
        block_tokens: Number of tokens that a block holds, unless it is a state.
        pool: Number of the pool, by which prompts and sequences have its tables.
        held: What its blocks hold.
        pass_tokens: Tokens that a pass of prefill computes at most.

    Attributes:
        rewinds: See `SequenceMemory`.
    """

    def __init__(
        self, count: int, block_tokens: int, pool: int = 0, held: Pool = None, pass_tokens: int = 0
    ) -> None:
        self.count, self.rewinds = count, held != "state"
        self.block_tokens = _ANY_NUMBER if held == "state" else block_tokens
        self._window = None if held == "state" else held
        self._pool, self._pass_tokens = pool, pass_tokens
        self._readers: Counter[Prompt] = Counter()
        self._free = list(range(count - 1, -1, -1))
        self._holders: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens fill."""
        return -(-tokens // self.block_tokens)

    def _at_once(self, tokens: int) -> int:
        """Blocks that so many neighbouring tokens need at once."""
        return window_blocks(tokens, self._window, self._pass_tokens, self.block_tokens)

    def _seen_from(self, place: int) -> int:
        """The first block that the token at a place of its table sees."""
        return 0 if self._window is None else max(0, place - self._window + 1) // self.block_tokens

    def take(self, blocks: int) -> list[int]:
        """Take so many free blocks, each with one holder.

        Raises:
            QeRLError: Fewer are free; ask :attr:`free` first.
        """
        if blocks > len(self._free):
            raise QeRLError(f"{blocks} cache blocks were asked for and {len(self._free)} are free.")
        taken = [self._free.pop() for _ in range(blocks)]
        self._holders.update(taken)
        return taken

    def share(self, blocks: list[int]) -> None:
        """Add a holder to each block; it must have one."""
        for block in blocks:
            if not self._holders[block]:
                raise QeRLError(f"Cache block {block} is free and cannot be shared.")
        self._holders.update(blocks)

    def release(self, blocks: list[int]) -> None:
        """Take one holder from each block; a block without holders is free again."""
        for block in blocks:
            if not self._holders[block]:
                raise QeRLError(f"Cache block {block} was released more often than taken.")
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._free.append(block)

    def check(self, prompt: Prompt, limit: int) -> None:
        """See `SequenceMemory.check`."""
        needed = self._at_once(prompt.cached_tokens) + self._at_once(limit)
        if needed > self.count:
            each = f"of {self.block_tokens} tokens" if self.rewinds else "with a state"
            raise QeRLError(
                f"Prompt {prompt.number} has {len(prompt.token_ids)} tokens and with {limit} new ones needs "
                f"{needed} cache blocks {each}; the cache has {self.count}: free GPU memory, or lower "
                "max_tokens."
            )

    def held(self, sequence: Sequence) -> int:
        """See `SequenceMemory.held`."""
        return len(self._held(sequence.blocks.get(self._pool, [])))

    def missing(self, sequence: Sequence, steps: int) -> int:
        """See `SequenceMemory.missing`."""
        first, end = self._needed(sequence, steps)
        held = len(self._held(sequence.blocks.get(self._pool, [])))  # those left behind are given back first
        return max(0, self._at_once((end - first) * self.block_tokens) - held)

    def prompt_missing(self, sequence: Sequence) -> int:
        """See `SequenceMemory.prompt_missing`."""
        prompt = sequence.prompt
        return 0 if self._pool in prompt.blocks else self._at_once(prompt.cached_tokens)

    def copy(self, sequence: Sequence) -> bool:
        """See `SequenceMemory.copy`; blocks of a prompt are never written to again, so they are shared."""
        prompt = sequence.prompt
        if self._pool in sequence.blocks:
            return False
        fresh = self._pool not in prompt.blocks
        if fresh:
            prompt.blocks[self._pool] = self._extended([], 0, self.blocks_for(prompt.cached_tokens))
        else:
            self.share(self._held(prompt.blocks[self._pool]))
        sequence.blocks[self._pool] = []
        self._readers[prompt] += 1
        return fresh

    def copies(self, sequence: Sequence) -> dict[int, int | None]:
        """See `SequenceMemory.copies`."""
        if self.rewinds or sequence.cached:
            return {}
        (own,), of_prompt = sequence.blocks[self._pool], sequence.prompt.blocks[self._pool]
        return {own: of_prompt[0] if of_prompt else None}

    def reserve(self, sequence: Sequence, steps: int) -> None:
        """See `SequenceMemory.reserve`."""
        first, end = self._needed(sequence, steps)
        table = sequence.blocks[self._pool]
        self._leave_behind(table, first, 1)
        if sequence.row is not None:  # its prompt has been computed
            prompt = sequence.prompt
            seen = self._seen_from(prompt.cached_tokens)
            self._leave_behind(prompt.blocks[self._pool], seen, self._readers[prompt])
        sequence.blocks[self._pool] = self._extended(table, first, end)

    def give_up(self, sequence: Sequence) -> None:
        """See `SequenceMemory.give_up`."""
        prompt, table = sequence.prompt, sequence.blocks.pop(self._pool, None)
        if table is not None:
            self.release(self._held(table))
            self.release(self._held(prompt.blocks[self._pool]))
            self._readers[prompt] -= 1
            if not self._readers[prompt]:
                del self._readers[prompt], prompt.blocks[self._pool]
        sequence.cached = 0

    def _held(self, table: list[int]) -> list[int]:
        """The blocks of a table, each once."""
        if self._window is None:
            return table
        return list(dict.fromkeys(block for block in table if block != GONE))

    def _needed(self, sequence: Sequence, steps: int) -> tuple[int, int]:
        """The first block that a sequence's next token sees, and the end of those for so many steps."""
        place = sequence.cached if sequence.row is None else sequence.generated
        return self._seen_from(place), self.blocks_for(sequence.own_tokens_after(steps))

    def _extended(self, table: list[int], first: int, end: int) -> list[int]:
        """A table up to ``end`` blocks, of which those from ``first`` on are needed at once."""
        most = self._at_once((end - first) * self.block_tokens)
        new = iter(self.take(max(0, min(end, first + most) - len(table))))
        table = table.copy()
        while len(table) < end:
            page = len(table)
            table.append(next(new) if page < first + most else table[page - most])
        return table

    def _leave_behind(self, table: list[int], first: int, holders: int) -> None:
        """Give back the blocks of a table that stand before the first needed one and not behind it."""
        if not first:
            return
        needed = set(table[first:])
        gone = [block for block in self._held(table[:first]) if block not in needed]
        for _ in range(holders):
            self.release(gone)
        table[:first] = [GONE] * len(table[:first])


class Pools:
    """The pools of a model whose layers see differently far, or some of which carry a state.

    It is a `qerl.rollout.paged.scheduler.SequenceMemory` whose numbers are those of each pool.
    """

    def __init__(self, pools: Items[BlockManager]) -> None:
        self._pools = pools
        self.rewinds = all(pool.rewinds for pool in pools)
        self.count = Units(pool.count for pool in pools)

    @property
    def free(self) -> Units:
        """Number of blocks that nobody holds, of each pool."""
        return Units(pool.free for pool in self._pools)

    def check(self, prompt: Prompt, limit: int) -> None:
        """See `SequenceMemory.check`."""
        for pool in self._pools:
            pool.check(prompt, limit)

    def held(self, sequence: Sequence) -> Units:
        """See `SequenceMemory.held`."""
        return Units(pool.held(sequence) for pool in self._pools)

    def missing(self, sequence: Sequence, steps: int) -> Units:
        """See `SequenceMemory.missing`."""
        return Units(pool.missing(sequence, steps) for pool in self._pools)

    def prompt_missing(self, sequence: Sequence) -> Units:
        """See `SequenceMemory.prompt_missing`."""
        return Units(pool.prompt_missing(sequence) for pool in self._pools)

    def copy(self, sequence: Sequence) -> bool:
        """See `SequenceMemory.copy`."""
        fresh = {pool.copy(sequence) for pool in self._pools}
        assert len(fresh) == 1, "the pools of a prompt come and go together"
        return fresh.pop()

    def copies(self, sequence: Sequence) -> dict[int, int | None]:
        """See `SequenceMemory.copies`."""
        return {block: source for pool in self._pools for block, source in pool.copies(sequence).items()}

    def reserve(self, sequence: Sequence, steps: int) -> None:
        """See `SequenceMemory.reserve`."""
        for pool in self._pools:
            pool.reserve(sequence, steps)

    def give_up(self, sequence: Sequence) -> None:
        """See `SequenceMemory.give_up`."""
        for pool in self._pools:
            pool.give_up(sequence)


def memory_of(
    counts: Items[int], held: Items[Pool], block_tokens: int, pass_tokens: int
) -> BlockManager | Pools:
    """The blocks of a cache with these pools, all of them free.

    Args:
        counts: Blocks of each pool.
        held: What each holds.
        block_tokens: Tokens of a block.
        pass_tokens: Tokens that a pass of prefill computes at most.
    """
    pools = [
        BlockManager(count, block_tokens, pool, of_pool, pass_tokens)
        for pool, (count, of_pool) in enumerate(zip(counts, held, strict=True))
    ]
    return pools[0] if len(pools) == 1 else Pools(pools)
