"""Dequantisation of NVFP4 tiles to a dense matrix, for training's large products.

Training's forward and backward multiply with a dense matrix, of 16 bits or in backward of 8, that lives for
one product. It is made from the resident bytes, whose order suits only the GPU's decode kernels; see
dequantize.cu.

Shapes: N outputs, K inputs.
"""

import struct
from pathlib import Path

import torch

from qerl.errors import QeRLError
from qerl.kernels.nvrtc import kernel
from qerl.kernels.weights.tiles import TILE, Tiles

_SOURCE = Path(__file__).with_name("dequantize.cu")
_TILES = 4
_STAGED_BYTES = 4 * 16 * 9 * 16  # warps, rows, 16-byte units of a row and one of padding
_TURNED_BYTES = _TILES * TILE * 80  # columns of 64 rows and 16 bytes of padding
_OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_OUT_E4M3 = 3


def dequantize_tiles(tiles: Tiles, global_scale: torch.Tensor, out_NK: torch.Tensor) -> None:
    """Write W [N, K], with exactly the values of :func:`qerl.fp4.format.dequantize`.

    Args:
        tiles: The weight on a GPU; its rows from N on are padding.
        global_scale: fp32 [1], a divisor.
        out_NK: bf16, fp16 or fp32; its row stride is a multiple of 16 bytes.

    Raises:
        QeRLError: The output does not have this width, dtype and alignment.
    """
    groups, columns = tiles.codes.shape[:2]
    rows, stride = out_NK.shape[0], out_NK.stride(0)
    aligned = not (stride * out_NK.element_size() | out_NK.data_ptr()) % 16
    if out_NK.dtype not in _OUT or out_NK.shape[1] != columns * TILE or out_NK.stride(1) != 1 or not aligned:
        raise QeRLError(
            f"A weight of width {columns * TILE} cannot be written to {out_NK.dtype} {tuple(out_NK.shape)} "
            f"with strides {out_NK.stride()}."
        )
    defines = (("TILES", _TILES), ("OUT", _OUT[out_NK.dtype]))
    compiled = kernel(_SOURCE, "dequantize", defines, tiles.codes.device.index or 0)
    grid = (min(groups, -(-rows // TILE)), -(-columns // _TILES))
    compiled(
        grid, 128, _STAGED_BYTES, (tiles.codes, tiles.scales, global_scale, out_NK), (rows, columns, stride)
    )


def transpose_to_e4m3(tiles: Tiles, factor: float, out_KN: torch.Tensor) -> None:
    """Write the transpose of code times block scale times ``factor``, rounded to the nearest E4M3 number.

    Args:
        tiles: The weight on a GPU, without padding.
        factor: At most 1/6, which maps 6 x 448 to E4M3's largest number; a power of two rounds least.
        out_KN: E4M3; its row stride is a multiple of 16 bytes.

    Raises:
        QeRLError: The output does not have this shape, dtype and alignment.
    """
    rows, columns = tiles.shape
    stride = out_KN.stride(0)
    fits = out_KN.dtype == torch.float8_e4m3fn and out_KN.shape == (columns, rows) and out_KN.stride(1) == 1
    if not fits or (stride | out_KN.data_ptr()) % 16:
        raise QeRLError(
            f"The transpose of a weight of {rows} x {columns} cannot be written in E4M3 to {out_KN.dtype} "
            f"{tuple(out_KN.shape)} with strides {out_KN.stride()}."
        )
    defines = (("TILES", _TILES), ("OUT", _OUT_E4M3))
    compiled = kernel(_SOURCE, "transpose_e4m3", defines, tiles.codes.device.index or 0)
    (bits,) = struct.unpack("i", struct.pack("f", factor))
    grid = rows // TILE, -(-columns // TILE // _TILES)
    compiled(grid, 128, _TURNED_BYTES, (tiles.codes, tiles.scales, out_KN), (columns // TILE, stride, bits))
