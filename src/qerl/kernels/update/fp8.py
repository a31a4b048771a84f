"""Rounding of a matrix to E4M3 with a scale per row, for products in FP8.

A gradient's tokens differ by orders of magnitude: a completion's advantage and the policy's certainty of a
token scale all numbers of that token. E4M3 has three bits of mantissa over a range of 2^17, so each row is
divided by a scale that makes its largest number E4M3's largest, 448, and the scale multiplies the token's row
of the product. A row is read twice, to find its largest number and to round it; the second time it comes from
the cache.

Shapes: T tokens, N outputs.
"""

import torch
import triton
import triton.language as tl

E4M3 = torch.float8_e4m3fn
_BLOCK = 8192
_TINY = tl.constexpr(1e-30)  # replaces the largest number of a row of zeros


def quantize_rows(x_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 numbers [T, N] and fp32 scales [T, 1], whose product is the matrix up to rounding.

    A row with a number that is not finite becomes all NaN.

    Args:
        x_TN: 16 bits or fp32, its rows contiguous.
    """
    tokens, width = x_TN.shape
    q_TN = torch.empty_like(x_TN, dtype=E4M3)
    scale_T1 = torch.empty(tokens, 1, dtype=torch.float32, device=x_TN.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    # Few rows at a time on a multiprocessor, so that all of them fit the cache until they are read again.
    _quantize_rows[(tokens,)](x_TN, q_TN, scale_T1, width, BLOCK=block, num_warps=max(1, block // 256))
    return q_TN, scale_T1


@triton.jit
def _quantize_rows(x_TN, q_TN, scale_T1, N, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    most_N = tl.zeros((BLOCK,), tl.float32)
    finite_N = tl.zeros((BLOCK,), tl.float32)  # x * 0 is NaN where x is not finite
    for first in range(0, N, BLOCK):
        x = tl.load(x_TN + t * N + first + n, mask=first + n < N, other=0.0).to(tl.float32)
        most_N = tl.maximum(most_N, tl.abs(x))
        finite_N += x * 0.0
    most = tl.maximum(tl.max(most_N), _TINY)
    scale = most / 448.0 + tl.sum(finite_N)
    tl.store(scale_T1 + t, scale)
    for first in range(0, N, BLOCK):
        x = tl.load(x_TN + t * N + first + n, mask=first + n < N, other=0.0).to(tl.float32)
        tl.store(q_TN + t * N + first + n, (x * (448.0 / most)).to(tl.float8e4nv), mask=first + n < N)
