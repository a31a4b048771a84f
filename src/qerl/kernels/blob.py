"""The one resident form of an NVFP4 weight on the GPU, and the GEMM that reads it.

A weight is reordered once, at load, into the order in which tensor cores take their operand; that is its only
copy. The layout is that of quack-kernels (see packed_gemm.cu), so that two kernels share it, each where it is
faster: this package's own for few tokens, where a product is as fast as the weight is read, and quack's from
then on.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from qerl.errors import QeRLError
from qerl.kernels.nvrtc import Kernel, kernel

_SOURCE = Path(__file__).with_name("packed_gemm.cu")
_MAX_TOKENS = 64


@dataclass(frozen=True)
class Blob:
    """An NVFP4 weight in fragment order.

    Attributes:
        codes: uint8 [N/64, K/64, 128, 16].
        scales: uint8 [N/64, K/64, 32, 4, 2], E4M3 bytes.
        shape: (N, K) with N a multiple of 128 and K a multiple of 64.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]


def to_blob(codes_NK: torch.Tensor, scales_NK: torch.Tensor) -> Blob:
    """Reorders packed codes [N, K/2] and E4M3 scales [N, K/16] (see qerl.nvfp4.format); rows are padded to
    128.

    Raises:
        QeRLError: K is not a multiple of 64.
    """
    rows, half = codes_NK.shape
    if half % 32:
        raise QeRLError(
            f"A packed weight of width {half * 2} cannot be laid out for the GPU: 64 must divide it."
        )
    padding = -rows % 128
    codes_NK = torch.nn.functional.pad(codes_NK, (0, 0, 0, padding))
    scales_NK = torch.nn.functional.pad(scales_NK.view(torch.uint8), (0, 0, 0, padding))
    n, tiles = (rows + padding) // 64, half // 32
    # byte = 8 b + 4 q + c and row = 16 w + 8 p + r: to (w, r, c) = thread and (b, q, p) = byte of the thread.
    codes = codes_NK.view(n, 4, 2, 8, tiles, 4, 2, 4).permute(0, 4, 1, 3, 7, 5, 6, 2)
    scales = scales_NK.view(n, 4, 2, 8, tiles, 4).permute(0, 4, 1, 3, 5, 2)
    return Blob(
        codes.reshape(n, tiles, 128, 16).contiguous(),
        scales.reshape(n, tiles, 32, 4, 2).contiguous(),
        (rows + padding, half * 2),
    )


def from_blob(blob: Blob) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K/2] and scales [N, K/16] as uint8, rows padded to 128: the exact inverse of
    :func:`to_blob`."""
    rows, width = blob.shape
    n, tiles = rows // 64, width // 64
    codes = blob.codes.view(n, tiles, 4, 8, 4, 4, 2, 2).permute(0, 2, 7, 3, 1, 5, 6, 4)
    scales = blob.scales.view(n, tiles, 4, 8, 4, 2).permute(0, 2, 5, 3, 1, 4)
    return codes.reshape(rows, width // 2), scales.reshape(rows, width // 16)


@dataclass(frozen=True)
class Tiling:
    """How packed_gemm.cu cuts a product.

    Attributes:
        rows: 16-row blocks a warp keeps.
        warps_n: Warps of a block along N.
        warps_k: Warps of a block along K, added in shared memory.
        depth: 16-byte loads a lane keeps in flight for each row block.
        splits: Cuts of K between blocks; partial sums are left to the reader.
        min_blocks: Blocks that must fit a multiprocessor, a limit on registers.
    """

    rows: int
    warps_n: int
    warps_k: int
    depth: int
    splits: int
    min_blocks: int

    def shared_bytes(self, tokens: int, width: int) -> int:
        tiles = -(-tokens // 8)
        k_tiles = -(-(width // 64) // self.splits)
        activations = tiles * 8 * (k_tiles * 8 + 4) * 16
        sums = (self.warps_k - 1) * self.warps_n * self.rows * tiles * 4 * 32 * 4
        return max(activations, sums)


def small_gemm(x_TK: torch.Tensor, blob: Blob, out_STN: torch.Tensor, tiling: Tiling) -> None:
    """out[s] = the part of x w^T that split s computes, times 2^-8 and without the global scale.

    Args:
        x_TK: bf16, contiguous, at most 64 tokens.
        blob: The weight.
        out_STN: fp32 [tiling.splits, T, N], contiguous.
        tiling: The cut.
    """
    (rows, width), tokens = blob.shape, x_TK.shape[0]
    if x_TK.shape[1] != width or not x_TK.is_contiguous() or tokens > _MAX_TOKENS:
        raise QeRLError(
            f"small_gemm takes contiguous [T <= {_MAX_TOKENS}, {width}], not {tuple(x_TK.shape)}."
        )
    if out_STN.shape != (tiling.splits, tokens, rows) or out_STN.dtype != torch.float32:
        raise QeRLError(
            f"small_gemm writes fp32 {(tiling.splits, tokens, rows)}, not {tuple(out_STN.shape)}."
        )
    shared = tiling.shared_bytes(tokens, width)
    compiled = _compiled(dataclasses.replace(tiling, splits=1), -(-tokens // 8), x_TK.device.index or 0)
    grid = (-(-rows // (16 * tiling.rows * tiling.warps_n)), tiling.splits)
    compiled(
        grid,
        32 * tiling.warps_n * tiling.warps_k,
        shared,
        (x_TK, blob.codes, blob.scales, out_STN),
        (tokens, rows, width),
    )


@cache
def _compiled(tiling: Tiling, tiles: int, device: int) -> Kernel:
    defines = {
        "TILES": tiles,
        "ROWS": tiling.rows,
        "WARPS_N": tiling.warps_n,
        "WARPS_K": tiling.warps_k,
        "DEPTH": tiling.depth,
        "MIN_BLOCKS": tiling.min_blocks,
    }
    return kernel(_SOURCE, "packed_gemm", tuple(defines.items()), device)
