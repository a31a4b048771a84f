"""Sum of the parts of x A^T that a kernel's programs left, for products that do not add the parts.

packed_gemm.cu adds the parts while it waits for its first activations; before products of other kernels, this
launch adds them.

Shapes: P parts, T tokens, R ranks stacked.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import begin
from qerl.kernels.launch import dependent, pointers


@triton.jit
def _add_parts(
    parts_PTR, sum_TR, numbers,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    begin(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, P, ROWS):
        p = (first + row)[:, None]
        at = parts_PTR + p.to(tl.int64) * numbers + n[None, :]
        total += tl.sum(tl.load(at, mask=(p < P) & (n < numbers)[None, :], other=0.0), axis=0)
    tl.store(sum_TR + n, total, mask=n < numbers)


def add_parts(parts_PTR: torch.Tensor, sum_TR: torch.Tensor) -> None:
    """Add the parts of x A^T in order.

    Args:
        parts_PTR: fp32 [P, T, R].
        sum_TR: fp32 [T, R], written.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    count, numbers = parts_PTR.shape[0], sum_TR.numel()
    arguments = pointers("add_parts", sum_TR, parts_PTR=parts_PTR, sum_TR=sum_TR)
    # 256 parts at once take 64 registers per thread, and wait for memory once.
    rows, block = min(256, triton.next_power_of_2(count)), 32
    _add_parts[(triton.cdiv(numbers, block),)](
        *arguments, numbers, P=count, ROWS=rows, BLOCK=block, num_warps=4, **dependent(sum_TR)
    )
