"""Which kernel computes a product, and its output as the reader wants it.

bf16 weights go to cuBLAS. NVFP4 weights go to this package's kernel for few tokens and to quack-kernels from
then on; both read the same bytes. The limit and the tilings were measured on an H100, see
docs/performance.md.
"""

import importlib.util
import math
from functools import cache

import torch

from qerl.errors import QeRLError
from qerl.kernels.blob import Blob, Tiling, small_gemm

_SMALL_TOKENS = 16


@cache
def has_quack() -> bool:
    return importlib.util.find_spec("quack") is not None


@cache
def tiling(tokens: int, rows: int, width: int) -> Tiling:
    """The cut of a product for few tokens.

    H100, Qwen2.5-7B shapes: up to 8 tokens two warps along K in each block are best, above that none. K is
    split so that the last wave of blocks is nearly full, each split costing its partial sums.
    """
    warps_n, warps_k = (4, 2) if tokens <= 8 else (8, 1)
    across = -(-rows // (16 * warps_n))
    slots = 132 * 3

    def merit(splits: int) -> float:
        waves = across * splits / slots
        return waves / math.ceil(waves) - 0.012 * splits

    most = max(1, width // 64 // (2 * warps_k))
    return Tiling(
        1, warps_n, warps_k, depth=4, splits=max(range(1, min(14, most) + 1), key=merit), min_blocks=3
    )


def scratch_bytes(tokens: int, rows: int, width: int, packed: bool) -> int:
    """Bytes of scratch that :func:`multiply` needs."""
    if packed and tokens <= _SMALL_TOKENS:
        return tiling(tokens, rows, width).splits * tokens * rows * 4
    return tokens * rows * 2


def multiply(
    x_TK: torch.Tensor, weight: Blob | torch.Tensor, scratch: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """x w^T into ``scratch``.

    Args:
        x_TK: bf16, contiguous.
        weight: The weight.
        scratch: uint8, at least :func:`scratch_bytes` long.

    Returns:
        The product [S, T, N], whose S parts are to be added, and whether it is 2^-8 too small.
    """
    tokens = x_TK.shape[0]
    rows, width = weight.shape
    if isinstance(weight, Blob) and tokens <= _SMALL_TOKENS:
        cut = tiling(tokens, rows, width)
        out = scratch[: cut.splits * tokens * rows * 4].view(torch.float32).view(cut.splits, tokens, rows)
        small_gemm(x_TK, weight, out, cut)
        return out, True
    out = scratch[: tokens * rows * 2].view(torch.bfloat16).view(1, tokens, rows)
    if isinstance(weight, Blob):
        _quack(x_TK, weight, out[0])
    else:
        torch.mm(x_TK, weight.T, out=out[0])
    return out, False


@cache
def quack_tile(tokens: int, rows: int, width: int) -> tuple[int, int, int]:
    """(tile_m, tile_n, split_k): rows of the weight and tokens a block computes, cuts of K.

    H100, Qwen2.5-7B shapes, microseconds against quack's own choice: qkv 12.9 / 22.9 at 64 tokens, 15.1 /
    25.3 at 128, 19.1 / 31.3 at 256; o 10.7 / 12.1; gate_up 98.7 / 113 at 256; down 54.5 / 66.4 at 256, 33.3 /
    34.2 at 64.
    """
    tile_n = min(256, max(32, 1 << (tokens - 1).bit_length()))
    long = width >= 8192
    if tokens > 512:
        return 128, 256, 1
    if tokens > 64:
        return 64, tile_n, 2 if long else 1 if rows >= 4608 else 2 if tile_n == 128 else 1
    if rows >= 112 * 128:
        return 128, tile_n, 1
    if rows <= 66 * 64 and not long:
        return 64, tile_n, 2
    return 128, tile_n, max(1, min(4, 132 * 128 // rows))


def _quack(
    x_TK: torch.Tensor, weight: Blob, out_TN: torch.Tensor, tile: tuple[int, int, int] | None = None
) -> None:
    try:
        from quack.gemm_w4 import gemm_w4a16
    except ImportError as error:
        raise QeRLError(
            "Products of NVFP4 weights with more than 16 tokens need the package quack-kernels: install it, "
            "or use the portable engine."
        ) from error
    tile_m, tile_n, split_k = tile or quack_tile(x_TK.shape[0], *weight.shape)
    gemm_w4a16(
        x_TK, weight.codes, sf=weight.scales, out=out_TN, wformat="nvfp4",
        tile_m=tile_m, tile_n=tile_n, split_k=split_k,
    )  # fmt: skip
