"""Products of NVFP4 tiles with many tokens, by quack-kernels.

Shapes: T tokens, N outputs, K inputs.
"""

import torch

from qerl.errors import QeRLError
from qerl.kernels.weights.packed_gemm import MAX_TOKENS
from qerl.kernels.weights.tiles import Tiles

Tile = tuple[int, int, int]
"""(tile_m, tile_n, split_k) of quack-kernels: rows of the weight and tokens that a block computes, and how
many blocks share K."""


def quack_tile(tokens: int, width: int) -> Tile:
    """The tile for more tokens than packed_gemm.cu takes.

    H100, Qwen2.5-7B shapes at 256 tokens, microseconds against quack's own choice: qkv 19.1 / 31.3; gate_up
    98.7 / 113; down 54.5 / 66.4.
    """
    if tokens > 512:
        return 128, 256, 1
    return 64, 256, 2 if width >= 8192 else 1


def quack_gemm(x_TK: torch.Tensor, tiles: Tiles, out_TN: torch.Tensor, tile: Tile) -> None:
    """Writes x w^T without the global scale.

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
            f"Products of NVFP4 weights with more than {MAX_TOKENS} tokens need the package quack-kernels: "
            "install it, or use the portable engine."
        ) from error
    tile_m, tile_n, split_k = tile
    gemm_w4a16(
        x_TK, tiles.codes, sf=tiles.scales, out=out_TN, wformat="nvfp4",
        tile_m=tile_m, tile_n=tile_n, split_k=split_k,
    )  # fmt: skip
