"""The paged engine's books and cache on a machine whose memory is counted in blocks."""

from dataclasses import replace
from types import SimpleNamespace

from qerl.errors import QeRLError
from qerl.kernels.limits import PAGE
from qerl.rollout.paged.decode import DecodeGraphs
from qerl.rollout.paged.kv_cache import KVCache
from tests.support.agents import tool_tokenizer
from tests.support.books import ONE_NUMBER, SayingPages
from tests.support.machine import Eager, Forgotten

POSITIONS = 4096
BLOCK_BYTES = 2 * PAGE * 4  # keys and values of one layer with one head of one number


class CountedGraphs(DecodeGraphs):
    """Knows which steps it could keep, and counts how often it drops them; the steps are the machine's.

    Args:
        cache, fit: Of the machine.
        blocks: Blocks whose memory steps take from when there are any until they are dropped.
    """

    forgotten = -1  # it begins by forgetting

    def __init__(self, cache, fit, blocks):
        super().__init__(ONE_NUMBER, cache, Eager(), 8)
        self._fit, self._blocks = fit, blocks

    def fit(self, *args):
        self.blocks = self._blocks
        return self._fit(*args)

    def forget(self):
        super().forget()
        self.blocks = 0
        self.forgotten += 1


class Limited(SayingPages):
    """Whose cache takes from blocks that others may take too.

    Attributes:
        others: Blocks that others hold.
    """

    others = 0

    def release(self):
        """Give up the memory of the cache."""
        self.parts.cache.give_up()


def made(blocks=10_000, rows=64, share=10_000, steps=0):
    """An engine whose sequences say more than they may, on a machine with so many blocks.

    Args:
        blocks: Those of all memory.
        rows: Sequences that run side by side at most.
        share: Blocks that the cache may have even if more are free.
        steps: Blocks whose memory captured steps take.
    """
    engine = Limited(tool_tokenizer(), lambda row, so_far: "a" * 300, 0, rows, POSITIONS)

    class Counted(Forgotten):
        def take_back(self):
            if self.given_up and len(self._bytes) > free() * BLOCK_BYTES:
                raise QeRLError("Others hold too much.")
            super().take_back()

    cache = KVCache(ONE_NUMBER, None, lambda size: Counted(size, "cpu"))
    graphs = CountedGraphs(cache, engine._fit, steps)

    def free():
        held = 0 if cache.given_up else cache.blocks[0]
        return blocks - held - graphs.blocks - engine.others

    def budget(freed):
        return min(share * BLOCK_BYTES, free() * BLOCK_BYTES + freed)

    engine.parts = replace(
        engine.parts,
        cache=cache,
        graphs=graphs,
        prefill=SimpleNamespace(run=lambda *_: None, forget=lambda: None),
        budget=budget,
    )
    return engine
