"""Stacked NVFP4 weights, and the choice of the kernel that multiplies with them.

Up to the most tokens that packed_gemm.cu takes on a card (512 with wgmma, 128 without) it is the faster
kernel (gate_up of 32B on an H100: 57 us, and 84 with quack-kernels, at 8 tokens, 77 and 104 at 64; at 256 and
512 it makes whole steps of 7B on an H200 five percent faster); quack-kernels multiplies more tokens than
that. Both read the same bytes. Where quack-kernels is not installed or has no kernel for the card, the weight
is dequantised and cuBLAS multiplies, as in the update: eight times the bytes, which from some hundred tokens
on take less time than the product.

Shapes: T tokens, N outputs, K inputs, L stacked linears.
"""

import logging
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from qerl.errors import QeRLError
from qerl.kernels.cards import CARDS, Card, card_of
from qerl.kernels.needs import has_module
from qerl.kernels.weights.dequantize import dequantize_tiles
from qerl.kernels.weights.packed_gemm import (
    MAX_TOKENS,
    NOTHING_AHEAD,
    OUTPUT_SCALE,
    Ahead,
    Tiling,
    packed_gemm,
    padded_tokens,
    partial_sums,
    slice_tokens,
    slices,
    sums_dtype,
)
from qerl.kernels.weights.product import NO_SUM, LoraSum, Product
from qerl.kernels.weights.tiles import Tiles
from qerl.kernels.workspace import workspace

logger = logging.getLogger(__name__)

# With wgmma, by padded tokens of a slice. Microseconds of gate_up and down of 32B, compared with other
# tilings: on an H100, at 128 tokens on an H200. The tilings of 8 and 256 tokens were chosen by whole steps of
# 7B on an H200 (docs/dev/decode-kernels.md).
_WGMMA_TILINGS = {
    8: Tiling(2, 2, 8, 8, sets=2, adder=True),
    16: Tiling(2, 2, 8, 4),  # 57.8 and 32.3; four warpgroups on 256 rows 58.3 and 32.5
    32: Tiling(3, 3, 4, 4),  # 62.0 and 34.0; four warpgroups on 256 rows 61.8 and 34.6
    64: Tiling(3, 3, 4, 4, 200_000),  # 77.1 and 40.9; two warpgroups on 128 rows 83.2 and 43.8
    128: Tiling(2, 2, 4, 4, 215_000, cluster=2),  # 124.9 and 66.9; without clusters 126.4 and 66.4
    256: Tiling(2, 2, 2, 2, 226_000, cluster=2, registers=240, adder=True),
}
# At 128 tokens, for weights of at least this many numbers: 117.0 and 65.3, without clusters 116.9 and 63.8. A
# block has all registers of its multiprocessor, so kernels before and after do not overlap with it, and whole
# steps decide (docs/dev/decode-kernels.md): on an H200 this tiling makes them faster for gate_up of 7B to
# 32B, slower for down of 7B and 14B, and neither for down of 32B.
_LARGE_WEIGHT = 3 << 25
_WGMMA_OF_LARGE_WEIGHT = Tiling(3, 3, 4, 4, 215_000, cluster=2, registers=160)

# Without wgmma, by padded tokens: first for blocks with the shared memory of compute capability 8.0, second
# for blocks with less. H200 treated as 8.0, microseconds of gate_up and down of 7B with four loading warps;
# the second tilings had as much shared memory there, and more stages than in 99 KB. The tilings of 16 and 32
# tokens were chosen with one loading warp.
_MMA_TILINGS = {
    8: (Tiling(4, 2, 8, 4), Tiling(2, 1, 8, 4)),  # 29.6 and 17.3; 31.8 and 18.6
    16: (Tiling(2, 2, 8, 4), Tiling(2, 2, 4, 4)),
    32: (Tiling(3, 3, 4, 4, fragments=2), Tiling(3, 3, 2, 2, fragments=2)),
    64: (  # 57.6 and 31.9, in two stages; 68.9 and 37.9
        Tiling(4, 4, 4, 2, fragments=2),
        Tiling(3, 3, 2, 2),
    ),
    128: (Tiling(2, 2, 2, 2), Tiling(3, 3, 1, 1)),  # 105.0 and 54.1; 122.9 and not measured
}
# Replaces the first tiling of 64 tokens for weights of fewer numbers, which give a block few tiles: q/k/v and
# o of 7B take 11.7 and 10.0, and 13.3 and 11.8 with the tiling above.
_SMALL_WEIGHT = 1 << 25
_OF_SMALL_WEIGHT = Tiling(2, 2, 4, 4)
_BARRIERS = 1024  # more than the kernel's own shared memory takes


def tiling_for(tokens: int, card: Card, shape: tuple[int, int]) -> Tiling:
    """Return how packed_gemm.cu tiles a product, from the tables above.

    Args:
        tokens: T, at most the number that packed_gemm.cu takes.
        card: Card that multiplies.
        shape: (N, K) of the weight.
    """
    padded, weight = slice_tokens(tokens), shape[0] * shape[1]
    if card.math == "wgmma":
        large_weight = padded == 128 and weight >= _LARGE_WEIGHT
        return _WGMMA_OF_LARGE_WEIGHT if large_weight else _WGMMA_TILINGS[padded]
    large, small = _MMA_TILINGS[padded]
    if padded == 64 and weight < _SMALL_WEIGHT:
        large = _OF_SMALL_WEIGHT
    tiling = large if card.shared_bytes >= CARDS[8, 0].shared_bytes else small
    return replace(tiling, shared_bytes=min(tiling.shared_bytes, card.shared_bytes - _BARRIERS))


def most_tokens(device: torch.device) -> int:
    """Return the maximum number of tokens that packed_gemm.cu multiplies on a device."""
    return MAX_TOKENS[card_of(device).math]


@cache
def quack_runs(device: torch.device) -> bool:
    """Return True if quack-kernels multiplies many tokens here; warn once if it could but is missing."""
    has_kernels, installed = card_of(device).quack, has_module("quack")
    if has_kernels and not installed:
        logger.warning(
            "quack-kernels is not installed, so passes of more than %d tokens, among them those of long "
            "prompts, dequantise each weight before its product; install the extra `gpu`.",
            most_tokens(device),
        )
    return has_kernels and installed


@dataclass(eq=False)
class NVFP4Stack:
    """One or several weights in NVFP4; a `qerl.kernels.weights.product.GemmWeight`.

    Attributes:
        tiles: Codes and block scales of all weights.
        scale_L: fp32 [L], the reciprocal of each linear's global scale.
        ahead: Data that the kernels after a product read; set by the code that puts products in an order.
        shape: (N, K), N padded.
    """

    tiles: Tiles
    scale_L: torch.Tensor
    ahead: Ahead = NOTHING_AHEAD
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.tiles.shape
        self._packed_gemm_scale_L = self.scale_L / OUTPUT_SCALE
        self._one = torch.ones(1, device=self.scale_L.device)

    def padded_tokens(self, tokens: int) -> int:
        """Return the tokens that packed_gemm.cu computes; 0 for more than it takes."""
        return padded_tokens(tokens) if tokens <= most_tokens(self.tiles.codes.device) else 0

    def scratch_bytes(self, tokens: int) -> int:
        """Return the bytes of the product."""
        device = self.tiles.codes.device
        if tokens > most_tokens(device):
            return tokens * self.shape[0] * 2
        most, _ = partial_sums(self._tiling(tokens), self.shape, device, slices(tokens))
        return most * tokens * self.shape[0] * sums_dtype(tokens).itemsize

    def multiply(self, x: torch.Tensor, tokens: int, scratch: torch.Tensor, xa: LoraSum = NO_SUM) -> Product:
        """x w^T; see `GemmWeight.multiply`."""
        rows, width = self.shape
        if tokens > most_tokens(x.device):
            xa.add()
            x_TK = x.view(-1)[: tokens * width].view(tokens, width)
            out_STN = scratch[: tokens * rows * 2].view(x.dtype).view(1, tokens, rows)
            if quack_runs(x.device):
                quack_gemm(x_TK, self.tiles, out_STN[0], quack_tile(tokens, width))
            else:
                self._dense_gemm(x_TK, out_STN[0])
            return Product(out_STN, None, self.scale_L)
        tiling = self._tiling(tokens)
        most, partials_G = partial_sums(tiling, self.shape, x.device, slices(tokens))
        dtype = sums_dtype(tokens)
        out_STN = scratch[: most * tokens * rows * dtype.itemsize].view(dtype).view(most, tokens, rows)
        packed_gemm(x, self.tiles, out_STN, tiling, xa, self.ahead)
        return Product(out_STN, partials_G, self._packed_gemm_scale_L)

    def _tiling(self, tokens: int) -> Tiling:
        return tiling_for(tokens, card_of(self.tiles.codes.device), self.shape)

    def _dense_gemm(self, x_TK: torch.Tensor, out_TN: torch.Tensor) -> None:
        # Codes times block scales are exact in 16 bits; the reader applies the linears' own.
        dense_NK = workspace(self.shape, x_TK)
        dequantize_tiles(self.tiles, self._one, dense_NK)
        torch.mm(x_TK, dense_NK.T, out=out_TN)


Tile = tuple[int, int, int]
"""(tile_m, tile_n, split_k) of quack-kernels: rows of the weight and tokens that a block computes, and how
many blocks share K."""


def quack_tile(tokens: int, width: int) -> Tile:
    """Return the tile for more tokens than packed_gemm.cu takes.

    Tiles for up to 512 tokens are for cards without wgmma, where they were not timed. H100, Qwen2.5-7B shapes
    at 256 tokens, microseconds against quack's own choice: qkv 19.1 / 31.3; gate_up 98.7 / 113; down 54.5 /
    66.4.
    """
    if tokens > 512:
        return 128, 256, 1
    return 64, 256, 2 if width >= 8192 else 1


def quack_gemm(x_TK: torch.Tensor, tiles: Tiles, out_TN: torch.Tensor, tile: Tile) -> None:
    """Write x w^T without the global scale.

    Args:
        x_TK: bf16.
        tiles: The weight.
        out_TN: bf16.
        tile: How the product is tiled.

    Raises:
        QeRLError: quack-kernels is not installed.
    """
    try:
        from quack.gemm_w4 import gemm_w4a16
    except ImportError as error:
        raise QeRLError(
            "Products of NVFP4 weights with many tokens need the package quack-kernels: install it, or use "
            "the portable engine."
        ) from error
    tile_m, tile_n, split_k = tile
    gemm_w4a16(
        x_TK, tiles.codes, sf=tiles.scales, out=out_TN, wformat="nvfp4",
        tile_m=tile_m, tile_n=tile_n, split_k=split_k,
    )  # fmt: skip
