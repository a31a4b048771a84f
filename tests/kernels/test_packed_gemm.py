"""packed_gemm.cu without a GPU: its index arithmetic, step by step in numpy, and its compilation.

What is walked through is the path without wgmma: which bytes the loading warp brings where, which of them a
lane decodes and multiplies, in the places that the PTX manual gives lanes for `ldmatrix` and `mma.m16n8k16`,
and where a sum is written. Warps run in a random order and wait on barriers as the kernel does.
"""

import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.products import dequantised
from bench.random_weights import random_tiles
from qerl.kernels.cards import CARDS
from qerl.kernels.nvrtc import compile_source
from qerl.kernels.weights import packed_gemm
from qerl.kernels.weights.dense import DenseStack
from qerl.kernels.weights.nvfp4 import NVFP4Stack, tiling_for
from qerl.kernels.weights.packed_gemm import OUTPUT_SCALE, Tiling, slice_tokens, slices, switches, to_operand
from qerl.rollout.paged.weights import AttentionWeights, Layer, Lora, MLPWeights, Projection, look_ahead

STACK = {128: 48}
"""Most bytes of a thread's stack by padded tokens. At 128 the fastest tiling for 99 KB keeps a few words
there; the fastest of those that keep nothing took 7 % longer (H200 treated as 8.0)."""

RESOURCES = r"REG:(\d+) STACK:(\d+) SHARED:(\d+)"
LANE = np.arange(32)
CODE_BYTES, SCALE_BYTES = 2048, 256


def bf16(bits):
    """The numbers of 16 bits each, in the low halves."""
    return ((bits & 0xFFFF).astype(np.uint32) << 16).view(np.float32)


def halves(registers):
    """[..., 2] numbers of 32-bit registers."""
    return np.stack([bf16(registers), bf16(registers >> 16)], -1)


def pair(low, high):
    """Registers of two numbers each, which bf16 holds exactly."""
    bits = np.stack([low, high]).astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return bits[0] >> 16 | bits[1]


def decode(codes, scale_word, odd):
    """[32, 4] registers of an A fragment, from [32] words of codes and of scales."""
    sign, magnitude = np.uint32(0x80008000), np.uint32(0x01C001C0)
    both = sign | magnitude
    low, high = (((scale_word >> np.uint32(16 * odd + 8 * i)) & 0xFF) << 4 for i in range(2))
    row, row8 = (bf16(bits) * np.float32(2.0**127) * np.float32(2.0**111) for bits in (low, high))
    with np.errstate(over="ignore"):
        r_lo = ((codes & np.uint32(0x000F000F)) * np.uint32(4160)) & both
        r_hi = ((codes & np.uint32(0x00F000F0)) * np.uint32(260)) & both
        s_lo = (((codes >> 8) & np.uint32(0x000F000F)) * np.uint32(4160)) & both
    s_hi = (codes & sign) | ((codes >> 6) & magnitude)
    scaled = [
        halves(bits) * scale[:, None]
        for bits, scale in ((r_lo, row), (s_lo, row8), (r_hi, row), (s_hi, row8))
    ]
    return np.stack([pair(values[:, 0], values[:, 1]) for values in scaled], -1)


def load_matrices(memory, at):
    """[32, 4] registers; lane 8 i + r gives the address of row r of matrix i."""
    rows = np.stack([memory[start : start + 16].view(np.uint32) for start in at])  # [32, 4]
    return np.stack([rows[8 * i + LANE // 4, LANE % 4] for i in range(4)], -1)


def multiply(a, b):
    """[32, 4] accumulators of a product of 16 x 16 and 16 x 8."""
    a_16x16, b_16x8 = np.zeros((16, 16)), np.zeros((16, 8))
    for i in range(4):
        for h in range(2):
            a_16x16[LANE // 4 + 8 * (i % 2), LANE % 4 * 2 + 8 * (i // 2) + h] = halves(a[:, i])[:, h]
    for i in range(2):
        for h in range(2):
            b_16x8[LANE % 4 * 2 + 8 * i + h, LANE // 4] = halves(b[:, i])[:, h]
    d = a_16x16 @ b_16x8
    return np.stack([d[LANE // 4 + 8 * (j // 2), LANE % 4 * 2 + j % 2] for j in range(4)], -1)


class Barrier:
    """A phase ends when all have arrived; who waits for a parity waits for the end of that phase."""

    def __init__(self, count):
        self.count = self.pending = count
        self.phase = 0

    def arrive(self):
        self.pending -= 1
        if not self.pending:
            self.pending, self.phase = self.count, self.phase ^ 1

    def wait(self, parity) -> Iterator[None]:
        while self.phase == parity:
            yield


class Block:
    """One block of threads, with its shared memory."""

    def __init__(self, index, blocks, tiling, stages, x, tiles, out_STN):
        self.tokens, self.y, self.tiling, self.stages = out_STN.shape[1], out_STN, tiling, stages
        self.padded, self.slices = slice_tokens(self.tokens), slices(self.tokens)
        self.slice, self.index, self.blocks = index % self.slices, index // self.slices, blocks // self.slices
        self.x, self.codes, self.scales = x, tiles.codes.numpy().ravel(), tiles.scales.numpy().ravel()
        self.groups, self.k_tiles = tiles.shape[0] // 64, tiles.shape[1] // 64
        self.total = -(-self.groups // (tiling.row_groups * tiling.cluster)) * self.k_tiles
        self.x_bytes = self.padded * 128
        self.weight_bytes = tiling.row_groups * (CODE_BYTES + SCALE_BYTES)
        self.memory = np.full(stages * tiling.stage_bytes(self.tokens), 0xFF, np.uint8)
        self.team = 128 // tiling.fragments
        self.warps = tiling.teams * self.team // 32
        self.full = [Barrier(128) for _ in range(stages)]
        self.empty = [Barrier(self.warps) for _ in range(stages)]
        self.together = Barrier(self.warps)
        self.k_groups = tiling.teams // tiling.row_groups
        self.sums = {}

    def pieces(self):
        """(row tile, first k tile, count, whether the block's part of the row tile ends)."""
        at, end = (self.total * (self.index + i) // self.blocks for i in range(2))
        while at < end:
            row_tile, first = divmod(at, self.k_tiles)
            count = min(self.tiling.tiles, self.k_tiles - first, end - at)
            yield row_tile, first, count, first + count == self.k_tiles or at + count == end
            at += count

    def first_group(self, row_tile):
        return row_tile * self.tiling.row_groups

    def release(self, stage):
        self.empty[stage].arrive()

    def copy(self, threads, to, source, start, size):
        for thread in threads:
            for at in range(thread * 16, size, 128 * 16):
                self.memory[to + at : to + at + 16] = source[start + at : start + at + 16]

    def load(self, warp):
        """A warp that loads."""
        tiles, row_groups, s, parity = self.tiling.tiles, self.tiling.row_groups, 0, 1
        threads = range(warp * 32, warp * 32 + 32)
        for row_tile, first, count, _ in self.pieces():
            yield from self.empty[s].wait(parity)
            stage = s * self.tiling.stage_bytes(self.tokens)
            for g in range(row_groups):
                tile = min(self.first_group(row_tile) + g, self.groups - 1) * self.k_tiles + first
                to = stage + g * tiles * CODE_BYTES
                self.copy(threads, to, self.codes, tile * CODE_BYTES, count * CODE_BYTES)
                to = stage + tiles * (row_groups * CODE_BYTES + g * SCALE_BYTES)
                self.copy(threads, to, self.scales, tile * SCALE_BYTES, count * SCALE_BYTES)
            to = stage + tiles * self.weight_bytes
            self.copy(threads, to, self.x, first * self.x_bytes, count * self.x_bytes)
            for _ in threads:
                self.full[s].arrive()
            s, parity = (0, parity ^ 1) if s + 1 == self.stages else (s + 1, parity)
            yield

    def compute(self, warp):
        """A warp that multiplies."""
        tiling, in_warps = self.tiling, self.team // 32
        fragments = tiling.fragments
        row_group, k_group = warp // in_warps % tiling.row_groups, warp // in_warps // tiling.row_groups
        first_fragment = warp % in_warps * fragments
        code_at = row_group * tiling.tiles * CODE_BYTES + (first_fragment * 32 + LANE) * 16
        scale_at = tiling.tiles * (tiling.row_groups * CODE_BYTES + row_group * SCALE_BYTES)
        scale_at = scale_at + (first_fragment * 8 + LANE // 4) * 8
        acc = np.zeros((fragments, self.padded // 8, 32, 4))
        stage, parity, meeting = 0, 0, 0
        for row_tile, _, count, ends in self.pieces():
            yield from self.full[stage].wait(parity)
            base = stage * tiling.stage_bytes(self.tokens)
            for t in range(k_group, count, self.k_groups):
                x_at = base + tiling.tiles * self.weight_bytes + t * self.x_bytes
                self.tile(acc, x_at, base + t * CODE_BYTES + code_at, base + t * SCALE_BYTES + scale_at)
            self.release(stage)
            stage, parity = (0, parity ^ 1) if stage + 1 == self.stages else (stage + 1, parity)
            if not ends:
                continue
            if self.k_groups > 1:
                self.sums[meeting, row_group, warp % in_warps, k_group] = acc.copy()
                self.together.arrive()
                yield from self.together.wait(meeting % 2)
                shares = [self.sums[meeting, row_group, warp % in_warps, k] for k in range(self.k_groups)]
                acc, meeting = sum(shares), meeting + 1
            group = self.first_group(row_tile) + row_group
            if k_group == 0 and group < self.groups:
                self.write(acc, row_tile, group * 64 + first_fragment * 16 + LANE // 4)
            acc = np.zeros_like(acc)

    def tile(self, acc, x_at, code_at, scale_at):
        for f, of_fragment in enumerate(acc):
            words = np.stack([self.memory[at + f * 512 :][:16].view(np.uint32) for at in code_at])
            scales = np.stack([self.memory[at + f * 64 :][:8].view(np.uint32) for at in scale_at])
            for k in range(4):
                a = decode(words[:, k], scales[:, k // 2], k % 2)
                for g, d in enumerate(of_fragment):
                    d += multiply(a, self.operand(x_at, g, k))

    def operand(self, x_at, g, k):
        """The second operand of 8 tokens and 16 k, from the loads with which the kernel gets that of more."""
        if self.padded <= 16:
            b = load_matrices(self.memory, x_at + g * 1024 + k // 2 * 512 + LANE * 16)
            return b[:, k % 2 * 2 :][:, :2]
        at = x_at + g // 2 * 2048 + k * 256 + LANE // 16 * 1024 + LANE % 16 * 16
        return load_matrices(self.memory, at)[:, g % 2 * 2 :][:, :2]

    def write(self, acc, row_tile, row):
        part = self.index - ((row_tile * self.k_tiles + 1) * self.blocks - 1) // self.total
        begin = self.index * self.total // self.blocks
        assert part == 0 or row_tile == begin // self.k_tiles, (
            "of a block's row tiles only the first has another"
        )
        if self.padded > 128:
            self.write_pairs(acc[0], part, row[0])
            return
        for f, of_fragment in enumerate(acc):
            for g, d in enumerate(of_fragment):
                m = g * 8 + LANE % 4 * 2
                for j in range(4):
                    inside = m + j % 2 < self.tokens
                    at = part, (m + j % 2)[inside], (row + f * 16 + 8 * (j // 2))[inside]
                    assert np.isnan(self.y[at]).all(), "written twice"
                    self.y[at] = d[inside, j]

    def write_pairs(self, acc, part, row):
        """What store_tile does with registers of two numbers."""
        odd = LANE % 2 == 1
        column = row + LANE % 4 * 2 + np.where(odd, 6, 0)
        for i, d in enumerate(acc):
            top, bottom = transposed(d[:, :2]), transposed(d[:, 2:])
            got = np.where(odd[:, None], top, bottom)[LANE ^ 1]
            four = np.where(odd[:, None], np.hstack([got, bottom]), np.hstack([top, got]))
            m = i * 8 + LANE // 4
            inside = m < self.tokens - self.slice * self.padded
            for j in range(4):
                at = part, (self.slice * self.padded + m)[inside], (column + j)[inside]
                assert np.isnan(self.y[at]).all(), "written twice"
                self.y[at] = four[inside, j]


def transposed(pairs):
    """movmatrix.trans: a lane has numbers 2 (lane % 4) and the next of row lane / 4 of 8 x 8."""
    matrix = np.zeros((8, 8))
    for h in range(2):
        matrix[LANE // 4, LANE % 4 * 2 + h] = pairs[:, h]
    return np.stack([matrix[LANE % 4 * 2 + h, LANE // 4] for h in range(2)], -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens,tiling,stages",
    [
        (5, Tiling(2, 1, 8, 4), 2),
        (5, Tiling(2, 2, 4, 4), 2),
        (13, Tiling(4, 1, 4, 2), 1),
        (20, Tiling(4, 4, 2, 2, fragments=2), 3),
        (20, Tiling(4, 2, 2, 2, fragments=2), 2),
        (60, Tiling(4, 4, 4, 2, fragments=2), 2),
        (60, Tiling(2, 2, 4, 4), 2),
        (40, Tiling(3, 3, 1, 1, fragments=2), 2),
        (70, Tiling(2, 2, 1, 1), 2),
        (70, Tiling(3, 3, 1, 1, fragments=2), 2),
    ],
)
def test_every_lane_finds_its_weights_and_activations(monkeypatch, tokens, tiling, stages):
    torch.manual_seed(0)
    rows, width, blocks = 384, 192, 5
    weight, x_TK = random_tiles(rows, width, device="cpu"), torch.randn(tokens, width).bfloat16()
    monkeypatch.setattr(packed_gemm, "multiprocessors", lambda device: blocks)
    packed_gemm.partial_sums.cache_clear()
    most, counts_G = packed_gemm.partial_sums(tiling, (rows, width), torch.device("cpu"), 1)
    packed_gemm.partial_sums.cache_clear()
    out_STN = np.full((most, tokens, rows), np.nan)
    x = to_operand(x_TK).view(torch.uint8).numpy()
    order = random.Random(0)
    for index in range(blocks):
        block = Block(index, blocks, tiling, stages, x, weight, out_STN)
        running = [*map(block.load, range(4)), *map(block.compute, range(block.warps))]
        for _ in range(100_000):
            if not running:
                break
            chosen = order.choice(running)
            if next(chosen, "ended") == "ended":
                running.remove(chosen)
        assert not running, "warps wait for one another"
    parts_SN = np.arange(most)[:, None] < counts_G.numpy().repeat(64)
    assert (np.isfinite(out_STN) == parts_SN[:, None]).all()
    found = np.nansum(out_STN, axis=0) / OUTPUT_SCALE
    expected = (x_TK.double() @ dequantised(weight).T).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    "megabytes,multiprocessors,expected", [(50, 132, 3), (72, 128, 5), (6, 82, 0), (6, 40, 1)]
)
def test_what_is_asked_of_the_cache_for_the_next_product_is_a_third_of_it(
    monkeypatch, megabytes, multiprocessors, expected
):
    monkeypatch.setattr(packed_gemm, "l2_bytes", lambda device: megabytes << 20)
    monkeypatch.setattr(packed_gemm, "multiprocessors", lambda device: multiprocessors)
    pieces = packed_gemm.pieces_ahead(Tiling(2, 1, 16, 4), torch.device("cpu"))
    assert pieces == expected
    assert pieces * 16 * (CODE_BYTES + SCALE_BYTES) * multiprocessors <= megabytes * 2**20 / 3


def test_weights_know_what_the_kernels_after_their_product_read():
    def layer(adapted):
        def projection(name):
            tiles = NVFP4Stack(random_tiles(128, 64, device="cpu"), torch.ones(1))
            lora = Lora(torch.zeros(2, 64), torch.zeros(128, 2)) if name in adapted else None
            return Projection(tiles, lora)

        qkv, o, gate_up, down = map(projection, ("qkv", "o", "gate_up", "down"))
        return Layer(None, None, AttentionWeights(qkv, o, None, None, None), None, MLPWeights(gate_up, down))

    first, second = layer({"qkv", "o", "gate_up", "down"}), layer({"qkv"})
    second.mixer.o.weight = DenseStack(torch.zeros(64, 64), torch.ones(1))
    look_ahead([first, second])
    gate_up, down, qkv = first.mlp.gate_up, first.mlp.down, second.mixer.qkv
    ahead = gate_up.weight.ahead
    assert (ahead.b_NR, ahead.a_RK) == (gate_up.lora.b_NR, down.lora.a_RK)
    assert ahead.tiles is down.weight.tiles
    across = down.weight.ahead
    assert (across.b_NR, across.a_RK) == (down.lora.b_NR, qkv.lora.a_RK)
    assert across.tiles is qkv.weight.tiles
    assert (qkv.weight.ahead.a_RK, qkv.weight.ahead.tiles) == (None, None)
    assert second.mlp.down.weight.ahead is packed_gemm.NOTHING_AHEAD


@pytest.mark.parametrize(
    "count, numbers, blocks, warps", [(28, 768, 132, 8), (148, 2048, 5, 12), (3, 16, 1, 2), (28, 256, 7, 1)]
)
def test_every_part_of_a_sum_is_added_once(count, numbers, blocks, warps):
    """add_parts: which numbers of which parts each lane loads, and what its pair and the others add."""
    parts = np.random.default_rng(0).standard_normal((count, numbers))
    found, flat = np.full(numbers, np.nan), parts.ravel()
    for block, warp in np.ndindex(blocks, warps):
        for first in range((block + blocks * warp) * 8, numbers, blocks * warps * 8):
            at, total = first + LANE % 2 * 4, np.zeros((32, 4))
            for lane in LANE:
                for p in range(lane // 2, count, 16):
                    total[lane] += flat[p * numbers + at[lane] :][:4]
            for step in (2, 4, 8, 16):
                total = total + total[LANE ^ step]
            for lane in range(2):
                assert np.isnan(found[at[lane] : at[lane] + 4]).all(), "written twice"
                found[at[lane] : at[lane] + 4] = total[lane]
    np.testing.assert_allclose(found, parts.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: str(card.number))
def test_packed_gemm_compiles_for_every_class_and_fits(card, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    some = {80: (8, 16, 32, 128), 86: (8, 16, 32, 64, 128), 90: (8, 16, 64, 128, 256, 512)}.get(
        card.number, (16, 128)
    )
    cases = [(tokens, (1 << 14, 1 << 14)) for tokens in some]
    cases += [(tokens, (4096, 4096)) for tokens in {80: [64], 90: [128]}.get(card.number, [])]
    for tokens, shape in cases:
        tiling = tiling_for(tokens, card, shape)
        stages = tiling.stages(tokens)
        assert stages >= (3 if card.shared_bytes < CARDS[8, 0].shared_bytes else 2)
        taken = stages * tiling.stage_bytes(tokens) + tiling.sums_bytes(tokens)
        compiled = tmp_path / "cubin"
        defines = switches(tiling, tokens, stages, card)
        compiled.write_bytes(compile_source(packed_gemm.SOURCE, defines, card.target))
        used = subprocess.run([cuobjdump, "--dump-resource-usage", compiled], capture_output=True, text=True)
        registers, stack, static = map(int, re.search(RESOURCES, used.stdout).groups())
        allowed = 0 if card.math == "wgmma" else STACK.get(tokens, 0)
        assert registers * tiling.threads(card) <= 1 << 16 and stack <= allowed, "registers are spilled"
        if tiling.registers:  # what is given up must be there, or whoever asks for it waits for ever
            kept = int(re.search(r"KEPT_REGISTERS (\d+)", packed_gemm.SOURCE.read_text()).group(1))
            wanted = 128 * (tiling.teams * tiling.registers + kept)
            assert registers * tiling.threads(card) >= wanted
        assert static % 1024 + taken <= card.shared_bytes, "the driver's kilobyte is not the block's"


@pytest.mark.parametrize(
    ("tokens", "shape", "teams", "cluster"),
    [
        (65, (37888, 3584), 3, 2),  # gate_up of 7B
        (128, (24576, 4096), 3, 2),  # of Qwen3-8B, the smallest
        (128, (24512, 4096), 2, 2),
        (128, (3584, 18944), 2, 2),  # down of 7B
        (64, (37888, 3584), 3, 1),
        (8, (37888, 3584), 2, 1),
    ],
)
def test_large_weights_have_three_warpgroups_above_64_tokens(tokens, shape, teams, cluster):
    tiling = tiling_for(tokens, CARDS[9, 0], shape)
    assert (tiling.teams, tiling.cluster) == (teams, cluster)
    assert bool(tiling.registers) == (tokens > 64 and teams == 3)
    assert all(
        tiling_for(tokens, card, shape).cluster == 1 for card in CARDS.values() if card.math != "wgmma"
    )


def test_copies_of_each_thread_have_no_eviction_policy():
    """ptxas encodes some of these wrongly for 9.0, where `QERL_ARCH=80` runs them; see the source."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    card = CARDS[8, 0]
    tiling = tiling_for(8, card, (4096, 4096))
    defines = switches(tiling, 8, tiling.stages(8), card)
    translated = compile_source(packed_gemm.SOURCE, defines, "compute_80")
    assert b"cp.async.cg" in translated and b"cache_hint" not in translated
