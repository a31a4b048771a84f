"""packed_gemm.cu in clusters of two blocks, without a GPU: who waits for whom, where shared activations come.

One lane of each block asks for copies, which come late and in any order, to one block earlier than to the
other. Warps multiply as in `tests.kernels.test_packed_gemm`.
"""

import random

import numpy as np
import pytest
import torch

from bench.products import dequantised
from bench.random_weights import random_tiles
from qerl.kernels.weights import packed_gemm
from qerl.kernels.weights.packed_gemm import OUTPUT_SCALE, Tiling, slices, to_operand
from tests.kernels.test_packed_gemm import CODE_BYTES, SCALE_BYTES, Barrier, Block

pytestmark = pytest.mark.slow


class CountingBarrier(Barrier):
    """One whose phase ends when all have arrived and all bytes that they expect have come."""

    def __init__(self, block, count):
        super().__init__(count)
        self.block, self.bytes = block, 0

    def arrive(self, expected=0):
        assert self.block.running, "arrival at a block that has ended"
        self.pending -= 1
        assert self.pending >= 0
        self.come(-expected)

    def come(self, size):
        assert self.block.running, "a copy to a block that has ended"
        self.bytes += size
        if not self.pending and not self.bytes:
            self.pending, self.phase = self.count, self.phase ^ 1


class OfCluster(Block):
    """A block whose stages the blocks of its cluster write to together."""

    def __init__(self, rank, cluster, *of_block):
        super().__init__(*of_block)
        self.rank, self.cluster, self.running, self.copies = rank, cluster, self.warps + 1, []
        self.full = [CountingBarrier(self, 1) for _ in range(self.stages)]
        self.empty = [CountingBarrier(self, self.tiling.cluster * self.warps) for _ in range(self.stages)]

    def first_group(self, row_tile):
        return (row_tile * self.tiling.cluster + self.rank) * self.tiling.row_groups

    def release(self, stage):
        for block in self.cluster:
            block.empty[stage].arrive()

    def ask(self, blocks, s, to, source, start, size):
        """A copy to the same place in some blocks; each is there after a while of its own."""

        def copied(block):
            block.memory[to : to + size] = 0xFF
            yield
            block.memory[to : to + size] = source[start : start + size]
            block.full[s].come(size)

        self.copies += map(copied, blocks)

    def load(self):
        """The lane that loads."""
        tiles, row_groups, n = self.tiling.tiles, self.tiling.row_groups, -1
        for n, (row_tile, first, count, _) in enumerate(self.pieces()):
            if n >= self.stages:
                yield from self.read(n - self.stages)
            s = n % self.stages
            stage = s * self.tiling.stage_bytes(self.tokens)
            self.full[s].arrive(count * (self.weight_bytes + self.x_bytes))
            for g in range(row_groups):
                tile = min(self.first_group(row_tile) + g, self.groups - 1) * self.k_tiles + first
                to = stage + g * tiles * CODE_BYTES
                self.ask([self], s, to, self.codes, tile * CODE_BYTES, count * CODE_BYTES)
                to = stage + tiles * (row_groups * CODE_BYTES + g * SCALE_BYTES)
                self.ask([self], s, to, self.scales, tile * SCALE_BYTES, count * SCALE_BYTES)
            copies = count if self.slices > 1 else 1
            size = count // copies * self.x_bytes // len(self.cluster)
            at, to = self.rank * size, stage + tiles * self.weight_bytes
            for t in range(copies):
                source = ((first + t) * self.slices + self.slice) * self.x_bytes + at
                self.ask(self.cluster, s, to + t * self.x_bytes + at, self.x, source, size)
            yield
        for last in range(max(0, n + 1 - self.stages), n + 1):
            yield from self.read(last)

    def read(self, piece):
        """Waits until all warps of the cluster have read a piece."""
        yield from self.empty[piece % self.stages].wait(piece // self.stages % 2)


def run(blocks, order):
    """The threads and copies of a cluster, one step of one of them at a time."""
    running = [
        (block, thread)
        for block in blocks
        for thread in (block.load(), *map(block.compute, range(block.warps)))
    ]
    for _ in range(1_000_000):
        running += [(None, copy) for block in blocks for copy in block.copies]
        for block in blocks:
            block.copies = []
        if not running:
            return
        block, chosen = one = order.choice(running)
        if next(chosen, "ended") == "ended":
            running.remove(one)
            if block:
                block.running -= 1
    raise AssertionError("blocks wait for one another")


@pytest.mark.parametrize(
    "tokens,width,tiling,stages",
    [
        (60, 576, Tiling(3, 3, 2, 2, cluster=2), 2),
        (70, 256, Tiling(2, 2, 1, 1, cluster=2), 2),
        (150, 256, Tiling(2, 2, 1, 1, cluster=2), 3),
        (300, 192, Tiling(2, 2, 2, 2, cluster=2), 2),
    ],
)
def test_blocks_of_a_cluster_share_activations(monkeypatch, tokens, width, tiling, stages):
    torch.manual_seed(0)
    rows, multiprocessors = 640, 9
    weight, x_TK = random_tiles(rows, width, device="cpu"), torch.randn(tokens, width).bfloat16()
    monkeypatch.setattr(packed_gemm, "multiprocessors", lambda device: multiprocessors)
    packed_gemm.partial_sums.cache_clear()
    of_slices = slices(tokens)
    most, counts_G = packed_gemm.partial_sums(tiling, (rows, width), torch.device("cpu"), of_slices)
    packed_gemm.partial_sums.cache_clear()
    out_STN, x = np.full((most, tokens, rows), np.nan), to_operand(x_TK).view(torch.uint8).numpy()
    order, clusters = random.Random(0), multiprocessors // (2 * of_slices) * of_slices
    for index in range(clusters):
        cluster = []
        cluster += [
            OfCluster(rank, cluster, index, clusters, tiling, stages, x, weight, out_STN) for rank in range(2)
        ]
        run(cluster, order)
    parts_SN = np.arange(most)[:, None] < counts_G.numpy().repeat(64)
    assert (np.isfinite(out_STN) == parts_SN[:, None]).all()
    expected = (x_TK.double() @ dequantised(weight).T).numpy()
    np.testing.assert_allclose(np.nansum(out_STN, axis=0) / OUTPUT_SCALE, expected, rtol=1e-12, atol=1e-9)
