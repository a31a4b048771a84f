"""Functions that the Triton kernels of a decode step share.

The step is laid out so that normalisation costs no launch of its own, and LoRA none where packed_gemm.cu
multiplies:

* RMSNorm is applied late. A norm kernel multiplies by the norm's weight, passes the result to the GEMM, and
  leaves partial sums of squares; every reader of the GEMM's output multiplies by 1/rms, which is one number
  per token and commutes with the product.
* x A^T (``xa`` below) is computed by the kernel that makes x, while x is in registers. Its programs hold
  different columns of x, so each leaves a part of the sum. The GEMM adds the parts, in order, while it waits
  for its first activations (packed_gemm.cu; before other products a small launch does it, add_parts). So the
  sum has the same bits every time, which atomic additions would not give. The kernel that reads the GEMM's
  output applies B.
* A kernel takes the ranks of a large adapter in parts of at most 128 (`qerl.kernels.limits`). It loads the
  first part before its wait (`begin`), like all weights, so up to 128 ranks there is no loop.
* A GEMM may leave partial sums over K; its reader adds them in order.

Results therefore do not depend on timing, nor, in a step of a given number of rows, on the other sequences of
the batch. Steps of other sizes split products differently, and their last bits differ.

Shapes: T tokens, D hidden, N out-features of a GEMM, I intermediate, H heads, R ranks stacked (each adapter's
padded with zeros to a power of two), S partial sums of a GEMM, G 64-row groups of its weight, P partial sums
of squares, or parts of x A^T.
"""

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Lets the next kernel be scheduled, then waits for the kernel before.

    What a kernel loads ahead of this overlaps with those before it: weights, and whatever was written before
    the last product, since a product lets its successor start only after its own wait, when all before it has
    ended. The other kernels promise nothing of the kind.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_late(PDL: tl.constexpr):
    """Waits for the kernel before, then lets the next one be scheduled: one that reads ahead of its own wait
    what the kernel before this has written."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_beside(PDL: tl.constexpr):
    """Lets the next kernel be scheduled and goes on beside the kernel before, of which this reads nothing and
    which has itself begun late. One program of a kernel that begins so ends with :func:`begin`: what
    comes next waits for this kernel alone."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def in_head(e, SIZE: tl.constexpr):
    """Which of these numbers a head has; a constant, which costs nothing, where that is all of them."""
    if e.shape[0] == SIZE:
        return tl.full(e.shape, 1, tl.int1)
    else:  # noqa: RET505 (Triton needs both branches)
        return e < SIZE


@triton.jit
def both(rows, in_e):
    """A mask [.., 1] of rows within a head, as :func:`in_head` says."""
    return rows & in_e[None, :]


@triton.jit
def load_head(at, in_e):
    """Numbers of a head, in one row or in several, zero beyond it."""
    if len(at.shape) == 1:
        return tl.load(at, mask=in_e, other=0.0)
    else:  # noqa: RET505
        return tl.load(at, mask=in_e[None, :], other=0.0)


@triton.jit
def inverse_rms(squares_PT, t, in_t, T, D, eps, P: tl.constexpr, P_PADDED: tl.constexpr):
    """1 / rms of each token from its partial sums of squares; 1 where there are none and so no norm."""
    if P == 0:
        return tl.full(t.shape, 1.0, tl.float32)
    else:  # noqa: RET505 (Triton needs both branches)
        p = tl.arange(0, P_PADDED)
        at = squares_PT + p[:, None] * T + t[None, :]
        squares = tl.load(at, mask=(p < P)[:, None] & in_t[None, :], other=0.0)
        return tl.rsqrt(tl.sum(squares, axis=0) / D + eps)


@triton.jit
def load_xa(xa_TR, first, t, in_t, R_TOTAL: tl.constexpr, R: tl.constexpr):
    """Columns first..first+R of x A^T, fp32 [BLOCK_T, R]."""
    at = xa_TR + t[:, None] * R_TOTAL + first + tl.arange(0, R)[None, :]
    return tl.load(at, mask=in_t[:, None], other=0.0)


@triton.jit
def load_b(b_NR, n, in_n, first, R: tl.constexpr, PART: tl.constexpr):
    """Columns first..first+PART of B's rows n, [BLOCK_N, PART]."""
    r = first + tl.arange(0, PART)
    return tl.load(b_NR + n[:, None] * R + r[None, :], mask=in_n[:, None], other=0.0)


@triton.jit
def load_a(a_RK, first, k, in_k, K, R: tl.constexpr, PART: tl.constexpr):
    """Rows first..first+PART of A's columns k, zero beyond R, [PART, BLOCK_K]."""
    r = first + tl.arange(0, PART)
    return tl.load(a_RK + r[:, None] * K + k[None, :], mask=(r < R)[:, None] & in_k[None, :], other=0.0)


@triton.jit
def apply_b(
    xa_TR, first, b, b_NR, n, in_n, t, in_t,
    R_TOTAL: tl.constexpr, R: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """(x A^T) B^T of one linear layer, whose columns of x A^T begin at ``first``; ``b`` is B's first part."""
    xa = load_xa(xa_TR, first, t, in_t, R_TOTAL, PART)
    return times_b(xa, xa_TR, first, b, b_NR, n, in_n, t, in_t, R_TOTAL, R, PART)


@triton.jit
def times_b(
    xa, xa_TR, first, b, b_NR, n, in_n, t, in_t,
    R_TOTAL: tl.constexpr, R: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """As :func:`apply_b`; ``xa`` is the first part of x A^T, which was loaded."""
    y = tl.dot(xa.to(b.dtype), tl.trans(b), out_dtype=tl.float32)
    for more in tl.static_range(PART, R, PART):
        xa = load_xa(xa_TR, first + more, t, in_t, R_TOTAL, PART)
        b = load_b(b_NR, n, in_n, more, R, PART)
        y += tl.dot(xa.to(b.dtype), tl.trans(b), out_dtype=tl.float32)
    return y


@triton.jit
def apply_a(
    parts_PTR, program, x, a, a_RK, k, in_k, K, t, in_t, T, R: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Writes this program's part of x A^T; ``a`` holds A's first rows."""
    for first in tl.static_range(0, R, PART):
        if first > 0:
            a = load_a(a_RK, first, k, in_k, K, R, PART)
        r = first + tl.arange(0, PART)
        partial = tl.dot(x, tl.trans(a), out_dtype=tl.float32)
        at = parts_PTR + (program * T + t[:, None]) * R + r[None, :]
        tl.store(at, partial, mask=in_t[:, None] & (r < R)[None, :])


@triton.jit
def partial_counts(partials_G, n, in_n, S: tl.constexpr):
    """Number of partial sums in each column of a GEMM's output."""
    if S > 1:
        return tl.load(partials_G + n // 64, mask=in_n, other=1)
    else:  # noqa: RET505 (Triton needs both branches)
        return tl.full(n.shape, 1, tl.int32)


@triton.jit
def sum_partials(gemm_STN, counts, t, in_t, n, in_n, T, N, S: tl.constexpr):
    """Tile of a GEMM's output with its partial sums added, fp32."""
    inside = in_t[:, None] & in_n[None, :]
    at = gemm_STN + t[:, None].to(tl.int64) * N + n[None, :]
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for s in tl.static_range(1, S):
        at = gemm_STN + (s * T + t[:, None]).to(tl.int64) * N + n[None, :]
        total += tl.load(at, mask=inside & (s < counts)[None, :], other=0.0).to(tl.float32)
    return total


@triton.jit
def in_slots(x_TN):
    """A tile whose columns, multiples of 16, are in the order of packed_gemm.cu's operand, or back from it.

    Of every 16 columns 2c + 1 and 2c + 8 have changed places: of column h c o, with one bit, two bits and one
    bit, the slot is o c h.
    """
    sixteens: tl.constexpr = x_TN.shape[1] // 16
    bits = tl.permute(tl.reshape(x_TN, (x_TN.shape[0], sixteens, 2, 4, 2)), (0, 1, 4, 3, 2))
    return tl.reshape(bits, (x_TN.shape[0], x_TN.shape[1]))


@triton.jit
def slots_at(t, slot, PADDED: tl.constexpr):
    """Where the slots of an operand for PADDED tokens are: [slot / 64, t / 8, 8 chunks, 8 tokens, 8 slots].

    Written with slot % 64 // 8 instead, Triton 3.6 does not see that eight slots are side by side.
    """
    column = slot // 8 * 64 + slot // 64 * (64 * PADDED - 512) + slot % 8
    return (t // 8 * 512 + t % 8 * 8)[:, None] + column[None, :]


@triton.jit
def store_operand(to, x_TN, t, n, inside, WIDTH, PADDED: tl.constexpr):
    """Stores a tile where the next GEMM reads it: row by row if PADDED is 0, else in packed_gemm.cu's order.

    There eight slots of a token are side by side, so the tile is stored in their order. Its first column and
    the number of those that there are is a multiple of 16, so ``inside`` is the same in either order.
    """
    x_TN = x_TN.to(to.dtype.element_ty)
    if PADDED == 0:
        tl.store(to + t[:, None].to(tl.int64) * WIDTH + n[None, :], x_TN, mask=inside)
    else:
        tl.store(to + slots_at(t, n, PADDED), in_slots(x_TN), mask=inside)


@triton.jit
def load_operand(source, t, n, inside, WIDTH, PADDED: tl.constexpr):
    """Loads the tile that `store_operand` has stored, zero outside."""
    if PADDED == 0:
        at = source + t[:, None].to(tl.int64) * WIDTH + n[None, :]
        return tl.load(at, mask=inside, other=0.0)
    else:  # noqa: RET505
        return in_slots(tl.load(source + slots_at(t, n, PADDED), mask=inside, other=0.0))
