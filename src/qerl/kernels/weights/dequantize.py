"""A weight in fragment order -> a dense matrix, for training's large products.

The forward and backward passes of training multiply with a dense 16-bit matrix that exists for one product.
It is made from the resident bytes, whose order only the GPU's decode kernels like; see dequantize.cu.
"""

from pathlib import Path

import torch

from qerl.errors import QeRLError
from qerl.kernels.nvrtc import kernel

_SOURCE = Path(__file__).with_name("dequantize.cu")
_TILES = 4
_STAGED_BYTES = 4 * 16 * 9 * 16  # warps, rows, 16-byte pieces of a row and one of padding
_OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def dequantize_into(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, out_NK: torch.Tensor
) -> None:
    """Writes W [N, K], the very values that :func:`qerl.fp4.format.dequantize` gives.

    Args:
        codes: uint8 [groups, K/64, 128, 16] with groups * 64 >= N; the rows beyond N are padding.
        scales: E4M3 or uint8 [groups, K/64, 32, 4, 2].
        global_scale: fp32 [1], a divisor.
        out_NK: bf16, fp16 or fp32; its rows may be apart, by a multiple of 16 bytes.

    Raises:
        QeRLError: The weight is no longer on the GPU.
    """
    groups, tiles = codes.shape[:2]
    if not codes.is_cuda:
        raise QeRLError(
            "A weight that was laid out for the GPU has left it: load the model again to use the CPU."
        )
    rows, stride = out_NK.shape[0], out_NK.stride(0)
    aligned = not (stride * out_NK.element_size() | out_NK.data_ptr()) % 16
    if out_NK.dtype not in _OUT or out_NK.shape[1] != tiles * 64 or out_NK.stride(1) != 1 or not aligned:
        raise QeRLError(
            f"A weight of width {tiles * 64} cannot be written to {out_NK.dtype} {tuple(out_NK.shape)} with "
            f"strides {out_NK.stride()}."
        )
    defines = (("TILES", _TILES), ("OUT", _OUT[out_NK.dtype]))
    compiled = kernel(_SOURCE, "dequantize", defines, codes.device.index or 0)
    grid = (min(groups, -(-rows // 64)), -(-tiles // _TILES))
    compiled(grid, 128, _STAGED_BYTES, (codes, scales, global_scale, out_NK), (rows, tiles, stride))
