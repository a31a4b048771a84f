"""Which blocks of the KV cache are free, and who holds the others: plain Python, no tensors.

A block holds the keys and values of 64 tokens. A prompt's blocks are held once by each sequence that reads
them, so the group shares them and the last to finish frees them. A sequence's own tokens start in a fresh
block even where the prompt's last block has room: nothing is ever copied or written to while shared, at the
price of less than one block per prompt.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from qerl.errors import QeRLError

if TYPE_CHECKING:  # the contract that sequences come from needs torch
    from qerl.rollout.session import Prompt, Sequence


class BlockManager:
    """Reference-counted blocks; a `qerl.rollout.paged.scheduler.SequenceMemory`.

    Args:
        count: Number of blocks in the cache.
        block_tokens: Number of tokens that a block holds.
    """

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self._free = list(range(count - 1, -1, -1))
        self._holders: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens fill."""
        return -(-tokens // self.block_tokens)

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
        needed = self.blocks_for(prompt.cached_tokens) + self.blocks_for(limit)
        if needed > self.count:
            raise QeRLError(
                f"Prompt {prompt.number} has {len(prompt.token_ids)} tokens and with {limit} new ones needs "
                f"{needed} cache blocks of {self.block_tokens} tokens; the cache has {self.count}: free GPU "
                "memory, or lower max_tokens."
            )

    def held(self, sequence: Sequence) -> int:
        """See `SequenceMemory.held`."""
        return len(sequence.blocks)

    def missing(self, sequence: Sequence, steps: int) -> int:
        """See `SequenceMemory.missing`."""
        return max(0, self.blocks_for(sequence.own_tokens_after(steps)) - len(sequence.blocks))

    def prompt_missing(self, sequence: Sequence) -> int:
        """See `SequenceMemory.prompt_missing`."""
        prompt = sequence.prompt
        return 0 if prompt.blocks is not None else self.blocks_for(prompt.cached_tokens)

    def copy(self, sequence: Sequence) -> bool:
        """See `SequenceMemory.copy`; blocks of a prompt are never written to again, so they are shared."""
        prompt = sequence.prompt
        if sequence.blocks:
            return False
        fresh = prompt.blocks is None
        if prompt.blocks is None:
            prompt.blocks = self.take(self.blocks_for(prompt.cached_tokens))
        else:
            self.share(prompt.blocks)
        prompt.readers += 1
        return fresh

    def reserve(self, sequence: Sequence, steps: int) -> None:
        """See `SequenceMemory.reserve`."""
        sequence.blocks += self.take(self.missing(sequence, steps))

    def give_up(self, sequence: Sequence) -> None:
        """See `SequenceMemory.give_up`."""
        prompt = sequence.prompt
        if sequence.blocks:
            assert prompt.blocks is not None
            self.release(sequence.blocks)
            self.release(prompt.blocks)
            prompt.readers -= 1
            if prompt.readers == 0:
                prompt.blocks = None
        sequence.blocks, sequence.cached = [], 0
