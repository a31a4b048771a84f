"""The GEMM of NVFP4 tiles with up to 512 tokens; see packed_gemm.cu.

Shapes: S partial sums, T tokens, N outputs, K inputs.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from qerl.errors import QeRLError
from qerl.kernels.cards import Card, card_of
from qerl.kernels.device import l2_bytes, multiprocessors
from qerl.kernels.nvrtc import Kernel, kernel
from qerl.kernels.weights.product import NO_SUM, LoraSum
from qerl.kernels.weights.tiles import TILE, TILE_BYTES, Tiles

SOURCE = Path(__file__).with_name("packed_gemm.cu")
"""The kernel."""

_TOKENS = (8, 16, 32, 64, 128, 256, 512)

MAX_TOKENS = {"wgmma": 512, "mma.sync": 128}
"""Maximum tokens that the kernel takes, by the instruction that multiplies."""

SLICE = 256
"""Maximum tokens that a block multiplies; more tokens are divided into slices."""

_HALF_FROM = 129
"""Tokens from which on the sums are bf16."""

OUTPUT_SCALE = 2.0**-8
"""The kernel's output is x w^T times this factor, which decoding a weight leaves, exactly."""


def padded_tokens(tokens: int) -> int:
    """Return the tokens that an operand for ``tokens`` tokens, at most 512, has room for."""
    return next(size for size in _TOKENS if size >= tokens)


def slice_tokens(tokens: int) -> int:
    """Return the tokens of a slice, with padding."""
    return min(SLICE, padded_tokens(tokens))


def slices(tokens: int) -> int:
    """Return the number of slices of this many tokens."""
    return padded_tokens(tokens) // slice_tokens(tokens)


def sums_dtype(tokens: int) -> torch.dtype:
    """Return the dtype in which the kernel writes partial sums of this many tokens."""
    return torch.float32 if tokens < _HALF_FROM else torch.bfloat16


def to_operand(x_TK: torch.Tensor) -> torch.Tensor:
    """Return activations, at most 512 tokens, flat and in the order that :func:`packed_gemm` reads.

    The kernels of a decode step write this order themselves, see
    :func:`qerl.kernels.decode.common.store_operand`.
    """
    tokens, width = x_TK.shape
    padded = padded_tokens(tokens)
    slots = torch.arange(16)
    low, odd = slots < 8, slots % 2 == 1
    source = torch.where(low & odd, slots + 7, torch.where(~low & ~odd, slots - 7, slots))
    x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, padded - tokens))
    x = x_TK.view(padded, width // 16, 16)[:, :, source.to(x_TK.device)]
    return x.view(padded // 8, 8, width // TILE, 8, 8).permute(2, 0, 3, 1, 4).reshape(-1)


@dataclass(frozen=True)
class Tiling:
    """How packed_gemm.cu tiles a product.

    Attributes:
        teams: Teams of warps that multiply, 2 to 4, with 64 rows each.
        row_groups: 64-row groups of a row tile that a block has, one team each; further teams share K.
        tiles: 64-wide tiles of K per stage.
        together: Tiles of a stage that a team multiplies before it waits: more overlap, more registers.
        shared_bytes: Maximum shared memory of the stages. The rest is room for the kernels before and after
            this one on the same multiprocessor.
        fragments: 16-row fragments of a warp: with 1 a team is a warpgroup, as wgmma needs; 2 is possible
            without wgmma, from 32 tokens on.
        cluster: Blocks that share a row tile and its activations: 1, or 2 with the copy engine. A row tile
            has `row_groups` groups of each block.
        registers: Registers of a thread that multiplies, a multiple of 8, where the four loading warps give
            up theirs; with wgmma. The block then has all registers of a multiprocessor. 0: all threads have
            the same number.
        sets: Sets of accumulators that the products of a warp use in turn, 1, 2 or 4; up to 16 tokens.
        adder: True if separate warps add the parts of x A^T while others multiply: an extra one, or with
            ``registers`` the three beside the one that loads.
    """

    teams: int
    row_groups: int
    tiles: int
    together: int
    shared_bytes: int = 176_000
    fragments: int = 1
    cluster: int = 1
    registers: int = 0
    sets: int = 1
    adder: bool = False

    def threads(self, card: Card) -> int:
        """Return the threads of a block: those that multiply, load and, with an extra warp, add."""
        one_warp = card.loader == "bulk" and not self.registers
        own = self.adder and not self.registers
        return self.teams * 128 // self.fragments + (32 if one_warp else 128) + 32 * own

    def sums_bytes(self, tokens: int) -> int:
        """Return the bytes of shared memory in which teams that share K add their sums."""
        return 2 * (self.teams // self.row_groups - 1) * self.row_groups * slice_tokens(tokens) * 256

    def stage_bytes(self, tokens: int) -> int:
        """Return the bytes of shared memory of one stage: codes, scales and activations."""
        return self.tiles * (self.row_groups * TILE_BYTES + slice_tokens(tokens) * 128)

    def stages(self, tokens: int) -> int:
        """Return the number of stages that fit, at most 16."""
        return min(16, (self.shared_bytes - self.sums_bytes(tokens)) // self.stage_bytes(tokens))


@cache
def partial_sums(
    tiling: Tiling, shape: tuple[int, int], device: torch.device, of_slices: int
) -> tuple[int, torch.Tensor]:
    """Return the maximum number of partial sums of any row that a product of this many slices leaves, and the
    number for each 64 rows, int32 [N/64]."""
    groups, k_tiles = shape[0] // TILE, shape[1] // TILE
    total, clusters = _tiles(tiling, shape), _clusters(tiling, shape, device, of_slices)
    counts = []
    for group in range(groups):
        first = group // (tiling.row_groups * tiling.cluster) * k_tiles
        ends = [((at + 1) * clusters - 1) // total for at in (first, first + k_tiles - 1)]
        counts.append(ends[1] - ends[0] + 1)
    return max(counts), torch.tensor(counts, dtype=torch.int32, device=device)


def _tiles(tiling: Tiling, shape: tuple[int, int]) -> int:
    """Return the number of tiles of K in all row tiles, with one row tile per cluster."""
    return -(-shape[0] // (TILE * tiling.row_groups * tiling.cluster)) * (shape[1] // TILE)


def _clusters(tiling: Tiling, shape: tuple[int, int], device: torch.device, of_slices: int) -> int:
    """Return the number of clusters that share the tiles of a slice's product; each of their blocks has a
    multiprocessor."""
    return min(multiprocessors(device) // (tiling.cluster * of_slices), _tiles(tiling, shape))


@dataclass(frozen=True, eq=False)
class Ahead:
    """Data that the kernels after a product read.

    On a card without dependent launch, the product of few tokens loads this data into the L2 cache once it
    has requested its own weight.

    Attributes:
        b_NR, a_RK: LoRA of the kernels up to the next product, contiguous; None without.
        tiles: The next product's weight; None if it is in another format.
    """

    b_NR: torch.Tensor | None = None
    a_RK: torch.Tensor | None = None
    tiles: Tiles | None = None


NOTHING_AHEAD = Ahead()

_AHEAD_TOKENS = 64
"""Maximum tokens at which loading ahead pays: an H200 treated as 8.0 decoded 7B 0.6 to 1.3 % faster with it
at 1, 8 and 64 tokens, and 2.2 % slower at 128."""


def pieces_ahead(tiling: Tiling, device: torch.device) -> int:
    """Return how many stages' worth of the next product's weight each block loads into the L2 cache.

    Together they take at most a third of the cache: the kernels between two products need the rest.
    """
    share = l2_bytes(device) // 3 // multiprocessors(device)
    return share // (tiling.tiles * tiling.row_groups * TILE_BYTES)


def packed_gemm(
    x: torch.Tensor,
    tiles: Tiles,
    out_STN: torch.Tensor,
    tiling: Tiling,
    xa: LoraSum = NO_SUM,
    ahead: Ahead = NOTHING_AHEAD,
) -> None:
    """Write the partial sums of x w^T, times `OUTPUT_SCALE` and without the global scale.

    Args:
        x: bf16, as :func:`to_operand` returns it for T tokens.
        tiles: The weight.
        out_STN: Of the dtype of :func:`sums_dtype`, contiguous, with the number of partial sums of
            :func:`partial_sums`; sums that a row does not have are left as they are.
        tiling: How the product is tiled.
        xa: Parts that the kernel adds as well, R a multiple of 8.
        ahead: Data that the kernels after this one read.

    Raises:
        QeRLError: Activations or output do not fit the weight and the number of tokens.
    """
    (rows, width), tokens = tiles.shape, out_STN.shape[1]
    padded = padded_tokens(tokens)
    dtype, count = sums_dtype(tokens), slices(tokens)
    most, _ = partial_sums(tiling, (rows, width), x.device, count)
    if x.numel() != padded * width or not x.is_contiguous():
        raise QeRLError(f"packed_gemm takes {padded} x {width} activations, not {tuple(x.shape)}.")
    if out_STN.shape != (most, tokens, rows) or out_STN.dtype != dtype:
        raise QeRLError(
            f"packed_gemm writes {dtype} {(most, tokens, rows)}, not {out_STN.dtype} {tuple(out_STN.shape)}."
        )
    stages, card = tiling.stages(tokens), card_of(x.device)
    parts, total = (out_STN[:0] if each is None else each for each in (xa.parts_PTR, xa.sum_TR))
    if card.dependent_launch or tokens > _AHEAD_TOKENS:
        ahead = NOTHING_AHEAD
    pointers, numbers = _arguments(ahead, tiles, tiling)
    _compiled(tiling, padded, stages, x.device.index or 0)(
        (tiling.cluster * count * _clusters(tiling, tiles.shape, x.device, count), 1),
        tiling.threads(card),
        stages * tiling.stage_bytes(tokens) + tiling.sums_bytes(tokens),
        (x, tiles.codes, tiles.scales, out_STN, parts, total, *pointers),
        (tokens, rows, width, parts.shape[0], total.numel(), *numbers),
    )


def _arguments(ahead: Ahead, tiles: Tiles, tiling: Tiling) -> tuple[list[torch.Tensor], list[int]]:
    """Return the kernel's arguments about the kernels after it; tensors of ``tiles`` stand in for missing
    ones."""
    matrices = [tiles.codes if each is None else each for each in (ahead.b_NR, ahead.a_RK)]
    sizes = [0 if each is None else each.nbytes for each in (ahead.b_NR, ahead.a_RK)]
    pieces = pieces_ahead(tiling, tiles.codes.device) if ahead.tiles else 0
    following = ahead.tiles or tiles
    return [*matrices, following.codes, following.scales], [*sizes, *following.shape, pieces]


@cache
def _compiled(tiling: Tiling, tokens: int, stages: int, device: int, experts: bool = False) -> Kernel:
    defines = switches(tiling, tokens, stages, card_of(torch.device("cuda", device)), experts)
    return kernel(SOURCE, "packed_gemm", tuple(defines.items()), device)


MANY_PAIRS = 256
"""Tokens times experts per token from which on blocks have more rows of an expert."""


def _divisor(width: int, most: int) -> int:
    """Return the largest number of tiles, up to ``most``, with which all stages are full; K is ``width``."""
    return max(count for count in range(1, most + 1) if not width // TILE % count)


def tiling_of_items(size: int, pairs: int, card: Card, shape: tuple[int, int]) -> Tiling:
    """Return how packed_gemm.cu tiles a product of items: with full stages, whatever K is.

    Qwen3-30B-A3B on an H200, tokens/s of whole steps with 128 and with 256 rows per block: 462 and 419 at one
    sequence, 1965 and 1834 at 8, 7792 and 7949 at 64, 12469 and 12843 at 128. gpt-oss-20b, whose experts have
    45 tiles of K: 465, 2193, 10682, 17435 with stages of 4 or 8 tiles, 495, 2301, 11385, 18786 as below.

    Args:
        size: Maximum tokens of an item.
        pairs: Tokens times experts per token.
        card: Card that multiplies.
        shape: (N, K) of an expert.
    """
    rows, width = shape
    most = card.shared_bytes - 1024
    shared = min(176_000, most)

    def groups(*counts: int) -> int:
        """Return the first of these numbers of 64-row groups whose row tiles divide an expert's rows, so that
        none reaches into the next expert."""
        return next(count for count in (*counts, 1) if not rows % (count * TILE))

    if card.math == "wgmma" and size <= 16 and pairs >= MANY_PAIRS:
        count, tiles = groups(3, 4, 2), _divisor(width, 9)
        return Tiling(max(count, 2), count, tiles, tiles, shared)
    if card.math == "wgmma" and not (rows % (2 * TILE) or width % (4 * TILE)):
        return Tiling(2, 2, _divisor(width, 12) if size <= 16 else 4, 4, shared)
    if card.math == "wgmma" and size <= 16:
        tiles = _divisor(width, 15)
        return Tiling(3, 1, tiles, -(-tiles // 3), shared)
    if card.math == "wgmma":
        count = groups(3)
        return Tiling(max(count, 2), count, _divisor(width, 9 if size <= 32 else 5), 3, min(215_000, most))
    count, large = groups(2, 3), card.shared_bytes >= 128 * 1024
    tiles = (4 if size <= 32 else 2) if large else 2
    return Tiling(max(count, 2), count, tiles, min(4, tiles), shared, fragments=1 if size <= 16 else 2)


def packed_gemm_of_items(
    x: torch.Tensor,
    tiles: Tiles,
    item_J2: torch.Tensor,
    count_1: torch.Tensor,
    out_SN: torch.Tensor,
    tiling: Tiling,
    size: int,
) -> None:
    """Write x w^T of experts, times `OUTPUT_SCALE` and without global scales.

    Args:
        x: bf16, each item as :func:`to_operand` returns it for ``size`` tokens.
        tiles: The weights of all experts, [E N, K].
        item_J2: int32, the expert and the number of tokens of each item.
        count_1: int32, the number of items.
        out_SN: fp32, ``size`` rows per item; rows beyond an item's tokens are left as they are.
        tiling: How the product is tiled.
        size: Maximum tokens of an item: 8, 16, 32 or 64.

    Raises:
        QeRLError: Activations or output do not fit the weight and the items, or the outputs of an expert are
            not a multiple of the tiling's rows.
    """
    (_, width), (places, rows) = tiles.shape, out_SN.shape
    if x.numel() != places * width or places != len(item_J2) * size:
        raise QeRLError(f"{len(item_J2)} items of {size} x {width} numbers are not {tuple(x.shape)}.")
    if rows % (TILE * tiling.row_groups):
        raise QeRLError(f"Experts of {rows} outputs are not tiled by {TILE * tiling.row_groups} rows.")
    stages, card = tiling.stages(size), card_of(x.device)
    _compiled(tiling, size, stages, x.device.index or 0, True)(
        (multiprocessors(x.device), 1),
        tiling.threads(card),
        stages * tiling.stage_bytes(size) + tiling.sums_bytes(size),
        (x, tiles.codes, tiles.scales, out_SN, item_J2, count_1),
        (rows, width),
    )


def switches(tiling: Tiling, tokens: int, stages: int, card: Card, experts: bool = False) -> dict[str, int]:
    """Return the kernel's compile-time parameters for this many padded tokens."""
    return {
        "EXPERTS": int(experts),
        "TOKENS": slice_tokens(tokens),
        "SLICES": slices(tokens),
        "TEAMS": tiling.teams,
        "ROW_GROUPS": tiling.row_groups,
        "FRAGMENTS": tiling.fragments,
        "TILES": tiling.tiles,
        "TOGETHER": tiling.together,
        "STAGES": stages,
        "CLUSTER": tiling.cluster,
        "REGISTERS": tiling.registers,
        "SETS": tiling.sets,
        "ADDERS": int(tiling.adder),
        "BULK": int(card.loader == "bulk"),
        "WGMMA": int(card.math == "wgmma"),
    }
