"""A product's finished output (partial sums, LoRA, 1/rms, bias), and its sums of squares, in one launch.

Most readers of a GEMM add its partial sums, LoRA and 1/rms themselves. Some cannot: a norm after attention or
MLP, and a norm of all query heads together, need the whole row before its first number. They read the output
of this kernel instead, and so do readers that cannot add a bias.

Shapes: as in `qerl.kernels.decode.common`; Y linears of the product, P blocks of columns.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import (
    apply_b,
    begin,
    inverse_rms,
    load_b,
    partial_counts,
    sum_partials,
)
from qerl.kernels.decode.launch import NO_B, LoraB
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import rank_part
from qerl.kernels.weights.product import Product


@triton.jit
def _sum_product(
    gemm_STN, partials_G, scale_Y, squares_PT, xa_TR, b_NR, bias_N, y_TN, y_squares_PT,
    T, N, D, eps, first_end, second_end,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr, R: tl.constexpr, PART: tl.constexpr,
    R_TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t, in_n = t < T, n < N
    first = block * BLOCK_N
    linear = (first >= first_end).to(tl.int32) + (first >= second_end).to(tl.int32)
    scale = tl.load(scale_Y + linear)
    counts = partial_counts(partials_G, n, in_n, S)
    if R > 0:
        b = load_b(b_NR, n, in_n, 0, R, PART)
    if HAS_BIAS:
        bias = tl.load(bias_N + n, mask=in_n, other=0.0).to(tl.float32)
    begin(PDL)
    y = sum_partials(gemm_STN, counts, t, in_t, n, in_n, T, N, S) * scale
    if R > 0:
        y += apply_b(xa_TR, linear * R, b, b_NR, n, in_n, t, in_t, R_TOTAL, R, PART)
    y *= inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)[:, None]
    if HAS_BIAS:
        y += bias[None, :]
    tl.store(y_TN + t[:, None].to(tl.int64) * N + n[None, :], y, mask=in_t[:, None] & in_n[None, :])
    tl.store(y_squares_PT + block * T + t, tl.sum(y * y, axis=1), mask=in_t)


def block_of(outputs: tuple[int, ...]) -> int:
    """Return the columns of a program: the largest power of two, up to 128, that divides each linear's
    outputs."""
    return min([128, *(rows & -rows for rows in outputs)])


def sum_product(
    product: Product,
    squares_PT: torch.Tensor,
    y_TN: torch.Tensor,
    y_squares_PT: torch.Tensor,
    *,
    outputs: tuple[int, ...],
    width: int,
    eps: float,
    bias_N: torch.Tensor | None = None,
    b: LoraB = NO_B,
) -> None:
    """Write ``(product + LoRA) / rms + bias``, and the sums of its squares over blocks of columns.

    Args:
        product: The GEMM's output.
        squares_PT: Partial sums of squares of the GEMM's input; empty where the input has no norm.
        y_TN: fp32, written.
        y_squares_PT: fp32 [N / `block_of`, T], written.
        outputs: Outputs of each of the product's linears, at most three; multiples of 16.
        width: Width of the GEMM's input, over which the mean square is taken.
        eps: Added to the mean square.
        bias_N: Bias of all linears; None without.
        b: LoRA of all linears.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, columns = y_TN.shape
    block_t, block_n, squares = 16, block_of(outputs), squares_PT.shape[0]
    ends = [sum(outputs[: i + 1]) if i + 1 < len(outputs) else columns for i in range(2)]
    arguments = pointers(
        "sum_product", y_TN, gemm_STN=product.out_STN, partials_G=product.partials_G,
        scale_Y=product.scale_L, squares_PT=squares_PT, xa_TR=b.xa.sum_TR, b_NR=b.b_NR, bias_N=bias_N,
        y_TN=y_TN, y_squares_PT=y_squares_PT,
    )  # fmt: skip
    _sum_product[(columns // block_n, triton.cdiv(tokens, block_t))](
        *arguments, tokens, columns, width, eps, *ends,
        S=product.out_STN.shape[0], SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        **b.constants(rank_part(b.ranks, shared_bytes(y_TN))), R_TOTAL=b.columns,
        HAS_BIAS=bias_N is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=4, **dependent(y_TN),
    )  # fmt: skip
