"""Bookkeeping of KV cache blocks, which are free, held or known by content: plain Python, no tensors.

A block holds the keys and values of 64 tokens, in all layers of a pool (`qerl.rollout.paged.limits`), or the
state of one sequence. A prompt's blocks are held once by each sequence that reads them, so the group shares
them and the last to finish frees them. A sequence's own tokens start in a fresh block even if the prompt's
last block has room: a shared block is never written to, at the price of less than one block per prompt.

**Prefixes.** If the session names its policy, a full block is known by its content: the policy's name and all
tokens up to the block's last. It stays known after its last holder has released it, until it is taken for
something else, least recently used first; so kept blocks still count as free. A new prompt takes the known
blocks that it begins with. This requires that own tokens are divided into blocks as those of a prompt are, at
multiples of 64 tokens from the prompt's first: the prompt's last block, unless it is full, is copied to the
first own block of each sequence. A decode step then reads up to 63 more tokens outside of shared blocks per
sequence, half a block on average; sessions without a policy name are spared this.

A state is a block that holds any number of tokens. Every token overwrites it, so a sequence that goes on
cannot share it: each entering sequence gets a copy of the prompt's state (`copies`), and a sequence for which
more tokens were computed than it keeps starts again from there (`rewinds`).

In a pool with a window, blocks that no later token attends to are released, and replaced with `GONE` in
tables. A text longer than the window and a prefill pass together never has all its blocks at once: its table
lists the blocks that one pass has left behind again for the tokens of a later one.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np

from qerl.errors import QeRLError
from qerl.rollout.paged.limits import Pool, Units, window_blocks

if TYPE_CHECKING:  # the contract that sequences come from needs torch
    from qerl.rollout.session import Prompt, Sequence

GONE = -1
"""Table entry of a block that was released."""

_ANY_NUMBER = 1 << 62
"""Tokens that a state has room for."""


Key = tuple[Hashable, bytes]
"""Content of a block: the name of a policy, and that of a page (`name_pages`)."""


class KnownPages:
    """Blocks by content, in both directions; valid as long as the memory of the blocks."""

    def __init__(self) -> None:
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # least recently used first

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def blocks(self) -> list[int]:
        """All known blocks, least recently used first."""
        return list(self._keys)

    def find(self, key: Key) -> int | None:
        """Return the block with this content, or None."""
        return self._blocks.get(key)

    def learn(self, block: int, key: Key) -> None:
        """Register the content of a block, unless a block with this content is already known."""
        if key not in self._blocks:
            self._blocks[key], self._keys[block] = block, key

    def use(self, block: int) -> None:
        """Mark a block as the most recently used."""
        self._keys[block] = self._keys.pop(block)

    def drop(self, block: int) -> None:
        """Forget a block, whose content is about to change."""
        del self._blocks[self._keys.pop(block)]

    def forget(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._keys.clear()


def name_pages(names: list[bytes], token_ids: Items[int], pages: int, page_tokens: int) -> None:
    """Extend the names of a text's pages to ``pages`` names; a name hashes its page and all before it."""
    for page in range(len(names), pages):
        held = np.asarray(token_ids[page * page_tokens : (page + 1) * page_tokens], np.int64)
        before = names[-1] if names else b""
        names.append(hashlib.blake2b(before + held.tobytes(), digest_size=16).digest())


class BlockManager:
    """Reference-counted blocks of one pool; a `qerl.rollout.paged.scheduler.SequenceMemory`.

    Args:
        count: Number of blocks in the pool.
        block_tokens: Number of tokens that a block holds, unless it is a state.
        pool: Index of the pool, and key of its tables in prompts and sequences.
        held: Content of its blocks.
        pass_tokens: Maximum tokens of a prefill pass.
        known: Blocks with known content, all of them free.
        policy: Name of the policy, for prefixes.

    Attributes:
        rewinds: See `SequenceMemory`.
        policy: As given; if None, prefixes are neither found nor registered.
    """

    def __init__(
        self,
        count: int,
        block_tokens: int,
        pool: int = 0,
        held: Pool = None,
        pass_tokens: int = 0,
        known: KnownPages | None = None,
        policy: Hashable | None = None,
    ) -> None:
        self.count, self.rewinds = count, held != "state"
        self.block_tokens = _ANY_NUMBER if held == "state" else block_tokens
        self._window = None if held == "state" else held
        self._pool, self._pass_tokens = pool, pass_tokens
        self._readers: Counter[Prompt] = Counter()
        self._known, self.policy = KnownPages() if known is None else known, policy
        self._unused = OrderedDict.fromkeys(self._known.blocks)  # known and free, least recently used first
        self._free = [block for block in range(count - 1, -1, -1) if block not in self._unused]
        self._holders: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """Number of blocks without a holder, known ones included."""
        return len(self._free) + len(self._unused)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens fill."""
        return -(-tokens // self.block_tokens)

    def _at_once(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` consecutive tokens need at once."""
        return window_blocks(tokens, self._window, self._pass_tokens, self.block_tokens)

    def _seen_from(self, place: int) -> int:
        """Return the index of the first block that the token at a place of its table attends to."""
        return 0 if self._window is None else max(0, place - self._window + 1) // self.block_tokens

    def take(self, blocks: int) -> list[int]:
        """Take this number of free blocks, each with one holder.

        Raises:
            QeRLError: Fewer are free; ask :attr:`free` first.
        """
        if blocks > self.free:
            raise QeRLError(f"{blocks} cache blocks were asked for and {self.free} are free.")
        taken = [self._free.pop() if self._free else self._unknown() for _ in range(blocks)]
        self._holders.update(taken)
        return taken

    def _unknown(self) -> int:
        """Return the least recently used of the known and free blocks, after forgetting its content."""
        block, _ = self._unused.popitem(last=False)
        self._known.drop(block)
        return block

    def share(self, blocks: list[int]) -> None:
        """Add a holder to each block; it must have one."""
        for block in blocks:
            if not self._holders[block]:
                raise QeRLError(f"Cache block {block} is free and cannot be shared.")
        self._holders.update(blocks)

    def release(self, blocks: list[int]) -> None:
        """Take one holder from each block; a block without holders is free again."""
        unused: list[int] = []
        for block in blocks:
            if not self._holders[block]:
                raise QeRLError(f"Cache block {block} was released more often than taken.")
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                (unused if block in self._known else self._free).append(block)
        for block in reversed(unused):  # a text's first pages last: without them it is not found
            self._known.use(block)
            self._unused[block] = None

    def check(self, prompt: Prompt, limit: int) -> None:
        """See `SequenceMemory.check`."""
        needed = self._at_once(prompt.cached_tokens) + self._at_once(prompt.tail + limit)
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
        if self._pool in prompt.blocks:
            return 0
        held = sum(block not in self._unused for block in self._found(prompt))
        return self._at_once(prompt.cached_tokens) - held

    def copy(self, sequence: Sequence) -> bool:
        """See `SequenceMemory.copy`; blocks of a prompt are never written to again, so they are shared."""
        prompt = sequence.prompt
        if self._pool in sequence.blocks:
            return False
        fresh = self._pool not in prompt.blocks
        if fresh:
            found = self._found(prompt)
            for block in found:
                self._unused.pop(block, None)
            self._holders.update(found)
            prompt.found = len(found) * self.block_tokens
            table = self._extended(found, 0, self.blocks_for(prompt.cached_tokens))
            prompt.blocks[self._pool] = table
            # Blocks are registered before they are computed: spans of prompts see what earlier spans wrote.
            self._learn(prompt.page_names, prompt.token_ids, table[: self._full(prompt)])
        else:
            self.share(self._held(prompt.blocks[self._pool]))
        sequence.blocks[self._pool] = []
        self._readers[prompt] += 1
        return fresh

    def copies(self, sequence: Sequence) -> dict[int, int | None]:
        """See `SequenceMemory.copies`."""
        if sequence.cached or (self.rewinds and not sequence.prompt.tail):
            return {}
        own, of_prompt = sequence.blocks[self._pool][0], sequence.prompt.blocks[self._pool]
        return {own: of_prompt[-1] if of_prompt else None}

    def learn(self, sequence: Sequence) -> None:
        """See `SequenceMemory.learn`; a sequence whose logits were not finite is not registered."""
        if self.policy is None or sequence.finish_reason == "error":
            return
        prompt, names = sequence.prompt, sequence.prompt.page_names.copy()
        before = self._full(prompt)
        full = before + sequence.cached // self.block_tokens
        own = sequence.blocks[self._pool][: full - before]
        table = prompt.blocks[self._pool][:before] + own
        self._learn(names, prompt.token_ids + sequence.token_ids, table)

    def _full(self, prompt: Prompt) -> int:
        """Return the number of full blocks of a prompt, which other prompts can share."""
        return prompt.shared_tokens // self.block_tokens

    def _learn(self, names: list[bytes], token_ids: list[int], table: list[int]) -> None:
        """Register the contents of the first blocks of a text, all of which are full."""
        if self.policy is not None:
            name_pages(names, token_ids, len(table), self.block_tokens)
            for name, block in zip(names, table, strict=True):
                self._known.learn(block, (self.policy, name))

    def _found(self, prompt: Prompt) -> list[int]:
        """Return the known blocks that a prompt begins with."""
        found: list[int] = []
        while self.policy is not None and len(found) < self._full(prompt):
            name_pages(prompt.page_names, prompt.token_ids, len(found) + 1, self.block_tokens)
            block = self._known.find((self.policy, prompt.page_names[len(found)]))
            if block is None:
                break
            found.append(block)
        return found

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
        """Return the blocks that a table holds, each once."""
        if self._window is None:
            return table
        return list(dict.fromkeys(block for block in table if block != GONE))

    def _needed(self, sequence: Sequence, steps: int) -> tuple[int, int]:
        """Return the first table index that the next token attends to, and the end for ``steps`` steps."""
        place = sequence.cached if sequence.row is None else sequence.own_tokens
        return self._seen_from(place), self.blocks_for(sequence.own_tokens_after(steps))

    def _extended(self, table: list[int], first: int, end: int) -> list[int]:
        """Return a table extended to ``end`` blocks; those from ``first`` on are needed at once."""
        most = self._at_once((end - first) * self.block_tokens)
        new = iter(self.take(max(0, min(end, first + most) - len(table))))
        table = table.copy()
        while len(table) < end:
            page = len(table)
            table.append(next(new) if page < first + most else table[page - most])
        return table

    def _leave_behind(self, table: list[int], first: int, holders: int) -> None:
        """Release the blocks that a table lists before index ``first`` and not again after it."""
        if not first:
            return
        needed = set(table[first:])
        gone = [block for block in self._held(table[:first]) if block not in needed]
        for _ in range(holders):
            self.release(gone)
        table[:first] = [GONE] * len(table[:first])


class Pools:
    """The pools of a model whose layers have different windows, or some of whose layers carry a state.

    It is a `qerl.rollout.paged.scheduler.SequenceMemory` whose amounts are `Units`, one number per pool.
    """

    policy: Hashable | None

    def __init__(self, pools: Items[BlockManager]) -> None:
        self._pools, self.policy = pools, None
        self.rewinds = all(pool.rewinds for pool in pools)
        self.count = Units(pool.count for pool in pools)

    @property
    def free(self) -> Units:
        """Number of blocks without a holder, per pool."""
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

    def learn(self, sequence: Sequence) -> None:
        """See `SequenceMemory.learn`; does nothing, as several pools keep no prefixes (`has_prefixes`)."""

    def reserve(self, sequence: Sequence, steps: int) -> None:
        """See `SequenceMemory.reserve`."""
        for pool in self._pools:
            pool.reserve(sequence, steps)

    def give_up(self, sequence: Sequence) -> None:
        """See `SequenceMemory.give_up`."""
        for pool in self._pools:
            pool.give_up(sequence)


def has_prefixes(held: Items[Pool]) -> bool:
    """Return True if a cache with these pools keeps prefixes, as only one without windows and states does.

    With several pools, a prefix would have to be present up to the same token in all of them.
    """
    return [*held] == [None]


def memory_of(
    counts: Items[int],
    held: Items[Pool],
    block_tokens: int,
    pass_tokens: int,
    known: KnownPages | None = None,
    policy: Hashable | None = None,
) -> BlockManager | Pools:
    """Return the bookkeeping of a cache with these pools, with all blocks free.

    Args:
        counts: Number of blocks of each pool.
        held: Content of each pool's blocks.
        block_tokens: Tokens of a block.
        pass_tokens: Maximum tokens of a prefill pass.
        known, policy: As in `BlockManager`; used only if the cache `has_prefixes`.
    """
    if has_prefixes(held):
        return BlockManager(counts[0], block_tokens, 0, None, pass_tokens, known, policy)
    pools = [
        BlockManager(count, block_tokens, pool, of_pool, pass_tokens)
        for pool, (count, of_pool) in enumerate(zip(counts, held, strict=True))
    ]
    return pools[0] if len(pools) == 1 else Pools(pools)
