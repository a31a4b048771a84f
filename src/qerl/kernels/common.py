"""What the Triton kernels of a decode step share.

The step is laid out so that LoRA and normalisation cost no launch of their own:

* RMSNorm is applied late. A norm kernel multiplies by the norm's weight, hands that to the GEMM, and
leaves partial
  sums of squares; every reader of the GEMM's output multiplies by 1/rms, which is one number a token and
  commutes with the product.
* x A^T is computed by the kernel that makes x, while x is in registers. Its programs hold different
columns of x, so
  they add their parts up in memory, as 64-bit fixed-point numbers: integer addition does not care about
  order, so the sum is the same every time, which floating-point atomics could not promise. The kernel that
  reads the GEMM's output applies B, and a kernel after it sets the sum back to zero.
* A GEMM may leave K-split partial sums; its reader adds them in order.

Results therefore do not depend on timing or on who else is in the batch.

Shapes: T tokens, D hidden, N out-features of a GEMM, I intermediate, H heads, R ranks stacked, S splits of a
GEMM, P partial sums of squares. R is a multiple of 16 (padded with zeros).
"""

import torch
import triton
import triton.language as tl

PAGE = 64
"""Tokens in a block of the KV cache."""

FIXED_POINT = tl.constexpr(2.0**28)  # sums up to 3e10 in steps of 4e-9


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernel before, then lets the next one be scheduled.

    What a kernel loads ahead of this overlaps with the kernel before: weights, and whatever was written at
    least two launches ago, since a kernel only starts after all before its predecessor have ended.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def inverse_rms(squares_PT, t, in_t, T, D, eps, P: tl.constexpr, P_PADDED: tl.constexpr):
    """1 / rms of each token from its partial sums of squares."""
    p = tl.arange(0, P_PADDED)
    squares = tl.load(
        squares_PT + p[:, None] * T + t[None, :], mask=(p < P)[:, None] & in_t[None, :], other=0.0
    )
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / D + eps)


@triton.jit
def add_low(low_TR, partial, t, in_t, r, in_r, R_TOTAL: tl.constexpr):
    """Adds a program's part of x A^T."""
    at = low_TR + t[:, None] * R_TOTAL + r[None, :]
    fixed = (partial * FIXED_POINT).to(tl.int64)
    tl.atomic_add(at, fixed, mask=in_t[:, None] & in_r[None, :], sem="relaxed")


@triton.jit
def load_low(low_TR, first, t, in_t, R_TOTAL: tl.constexpr, R: tl.constexpr):
    """Columns first..first+R of x A^T, fp32 [BLOCK_T, R]."""
    at = low_TR + t[:, None] * R_TOTAL + first + tl.arange(0, R)[None, :]
    return tl.load(at, mask=in_t[:, None], other=0).to(tl.float32) / FIXED_POINT


@triton.jit
def clear(spent_TR, program, t, in_t, R: tl.constexpr, R_PADDED: tl.constexpr):
    """Sets a sum that has been read by the kernel before back to zero; program 0 does it."""
    if R > 0 and program == 0:
        r = tl.arange(0, R_PADDED)
        zero = tl.zeros((t.shape[0], R_PADDED), tl.int64)
        tl.store(spent_TR + t[:, None] * R + r[None, :], zero, mask=in_t[:, None] & (r < R)[None, :])


@triton.jit
def sum_splits(gemm_STN, t, in_t, n, in_n, T, N, S: tl.constexpr):
    """Tile of a GEMM's output with its splits added, fp32."""
    inside = in_t[:, None] & in_n[None, :]
    at = gemm_STN + t[:, None].to(tl.int64) * N + n[None, :]
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for s in tl.static_range(1, S):
        at = gemm_STN + (s * T + t[:, None]).to(tl.int64) * N + n[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return total


def partial_count(columns: int, block: int) -> int:
    """Partial sums that a kernel leaves which cuts ``columns`` into blocks."""
    return -(-columns // block)


def ranks(low_TR: torch.Tensor | None) -> int:
    """Stacked ranks of a sum, 0 without LoRA."""
    return 0 if low_TR is None else low_TR.shape[1]
