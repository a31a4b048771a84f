"""A weight in fragment order -> a dense matrix, for training's large products.

The forward and backward passes of training multiply with a dense bf16 matrix that exists for one product. It
is made from the resident bytes, whose order only the GPU's decode kernels like; see packed_gemm.cu for it.
"""

import torch
import triton
import triton.language as tl

from qerl.errors import QeRLError


@triton.jit
def _dequantize(codes, scales, scale_1, out_NK, N, K, TILE: tl.constexpr):
    group, tile = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, TILE)
    pair = tl.arange(0, TILE // 2)
    base = group.to(tl.int64) * (K // TILE) + tile
    warp, upper, lane_row = row // 16, (row % 16) // 8, row % 8
    block, high_k, lane_column = pair // 8, (pair % 8) // 4, pair % 4
    thread = (32 * warp + 4 * lane_row)[:, None] + lane_column[None, :]
    byte = upper[:, None] + (4 * block + 2 * high_k)[None, :]
    code = tl.load(codes + base * 2048 + thread * 16 + byte).to(tl.int32)
    slot = (8 * warp + lane_row)[:, None] * 8 + (2 * block)[None, :] + upper[:, None]
    scale = tl.load(scales + base * 256 + slot).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scale = scale * tl.load(scale_1)
    low, high = code & 15, code >> 4
    even = _e2m1(low) * scale
    odd = _e2m1(high) * scale
    values = tl.interleave(even, odd).to(out_NK.dtype.element_ty)
    n = group * TILE + row
    k = tile * TILE + tl.arange(0, TILE)
    tl.store(out_NK + n[:, None].to(tl.int64) * K + k[None, :], values, mask=(n < N)[:, None])


@triton.jit
def _e2m1(code):
    magnitude = code & 7
    # Shifted to bf16's last exponent bits and first mantissa bit, a code is its value times 2^-126.
    bits = (magnitude << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude * 0.5, bits * 8.507059173023462e37)
    return tl.where(code > 7, -value, value)


def dequantize_fragments(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """W [rows, K], the same values as :func:`qerl.nvfp4.format.dequantize` gives.

    Args:
        codes: uint8 [N/64, K/64, 128, 16].
        scales: E4M3 or uint8 [N/64, K/64, 32, 4, 2].
        global_scale: fp32 [1], a divisor.
        rows: Rows wanted, at most N: the rest is padding.
        dtype: Of the result.
    """
    groups, tiles = codes.shape[:2]
    if not codes.is_cuda:
        raise QeRLError(
            "A weight that was laid out for the GPU has left it: load the model again to use the CPU."
        )
    out_NK = torch.empty(rows, tiles * 64, dtype=dtype, device=codes.device)
    _dequantize[(groups, tiles)](
        codes, scales.view(torch.uint8), 1.0 / global_scale, out_NK, rows, tiles * 64, TILE=64, num_warps=4
    )
    return out_NK
