"""Adapters of experts, added to a product of items (`qerl.kernels.weights.experts`).

    xa = x A^T            # of each item, in parts over K
    out += xa / scale B^T

The product leaves the factors of each expert's linears to the kernel after it, so x A^T is divided by them.
Both matrices are [G, ..], per expert or one for all, in the activations' dtype; B is scaled by alpha / r.

Given up: computing x A^T in the kernel that writes x, as for other adapters. A program there has a token and
some columns; a program here has an item, and reads an expert's A once for all of the item's tokens.

Shapes: J items, M places of an item, S = J M, L linears of a product, K inputs, N outputs of a linear, R
padded rank, P parts of K, G experts or 1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import begin, load_operand
from qerl.kernels.decode.route import Items
from qerl.kernels.launch import dependent, pointers
from qerl.kernels.limits import LORA_PART, parts_of


@dataclass(frozen=True, eq=False)
class ExpertLoraMatrices:
    """The adapters of one product of all experts.

    Attributes:
        a_GLRK: A of each linear, zero beyond its rank.
        b_GLNR: B of each linear, zero beyond its rank.
    """

    a_GLRK: torch.Tensor
    b_GLNR: torch.Tensor


@triton.jit
def _items_times_a(
    x, a_GLRK, item_J2, count_1, xa_PLSR, S, K, EACH, OF_EXPERT,
    L: tl.constexpr, R: tl.constexpr, M: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item, linear, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, R)
    begin(PDL)
    if item < tl.load(count_1):
        expert, used = tl.load(item_J2 + item * 2).to(tl.int64), tl.load(item_J2 + item * 2 + 1)
        in_m = m < used
        a_RK = a_GLRK + expert * OF_EXPERT + linear * R * K
        total = tl.zeros([BLOCK_M, R], tl.float32)
        for first in range(part * EACH, tl.minimum(part * EACH + EACH, K), BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            in_k = k < K
            rows = load_operand(x + item * M * K, m, k, in_m[:, None] & in_k[None, :], K, PADDED)
            a = tl.load(a_RK + r[None, :] * K + k[:, None], mask=in_k[:, None], other=0.0)
            total += tl.dot(rows, a, out_dtype=tl.float32)
        at = xa_PLSR + ((part * L + linear) * S + item * M + m)[:, None] * R + r[None, :]
        tl.store(at, total, mask=in_m[:, None])


@triton.jit
def _add_items_times_b(
    xa_PLSR, b_GLNR, scale_EL, item_J2, count_1, out_SN, S, N, OF_EXPERT,
    L: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item, linear = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, R)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    begin(PDL)
    if item < tl.load(count_1):
        expert, used = tl.load(item_J2 + item * 2).to(tl.int64), tl.load(item_J2 + item * 2 + 1)
        in_m = m < used
        xa = tl.zeros([BLOCK_M, R], tl.float32)
        for part in tl.static_range(P):
            at = xa_PLSR + ((part * L + linear) * S + item * M + m)[:, None] * R + r[None, :]
            xa += tl.load(at, mask=in_m[:, None], other=0.0)
        xa = xa / tl.load(scale_EL + expert * L + linear)
        b_NR = b_GLNR + expert * OF_EXPERT + linear * N * R
        b = tl.load(b_NR + n[None, :] * R + r[:, None], mask=in_n[None, :], other=0.0)
        at = out_SN + (item * M + m)[:, None] * (L * N) + linear * N + n[None, :]
        inside = in_m[:, None] & in_n[None, :]
        y = tl.load(at, mask=inside, other=0.0)
        tl.store(at, y + tl.dot(xa.to(b.dtype), b, out_dtype=tl.float32), mask=inside)


def _block(rank: int, block_m: int) -> int:
    """Return the inputs of A that a program multiplies at a time, and the outputs of B that it computes.

    They are as many as fit into the shared memory of any GPU, as each iteration and each program waits for
    memory anew.
    """
    if rank <= 32 and block_m == 16:
        return 256
    return 128 if rank <= 64 and block_m <= 32 else 64


def add_expert_lora(
    x: torch.Tensor,
    lora: ExpertLoraMatrices,
    scale_EL: torch.Tensor,
    items: Items,
    xa: torch.Tensor,
    out_SN: torch.Tensor,
    in_order: bool,
) -> None:
    """Add B A x to a product of items.

    Args:
        x: Input of the product: M rows of K numbers per item, see ``in_order``.
        lora: The adapters.
        scale_EL: fp32, the factors that the product has left out.
        items: As `qerl.kernels.decode.route.arrange` has written them.
        xa: fp32, room for P L S R numbers (`qerl.kernels.limits.parts_of`).
        out_SN: fp32 output of the product, the outputs of its linears side by side; added to.
        in_order: Whether ``x`` is in the order of ``packed_gemm`` for M tokens, else [M, K].

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    groups, linears, rank, width = lora.a_GLRK.shape
    outputs, places = lora.b_GLNR.shape[2], len(out_SN)
    parts, block_m = parts_of(places, width), max(16, items.size)
    each, block = width if parts == 1 else LORA_PART, _block(rank, block_m)
    arguments = pointers(
        "items_times_a", x, x=x, a_GLRK=lora.a_GLRK, item_J2=items.item_J2, count_1=items.count_1, xa=xa
    )
    of_expert = 0 if groups == 1 else linears * rank * width
    _items_times_a[(len(items.item_J2), linears, parts)](
        *arguments, places, width, each, of_expert, L=linears, R=rank, M=items.size,
        PADDED=items.size if in_order else 0, BLOCK_M=block_m, BLOCK_K=block,
        num_warps=4 if rank <= 64 else 8, **dependent(x),
    )  # fmt: skip
    arguments = pointers(
        "add_items_times_b", x, xa=xa, b_GLNR=lora.b_GLNR, scale_EL=scale_EL, item_J2=items.item_J2,
        count_1=items.count_1, out_SN=out_SN,
    )  # fmt: skip
    of_expert = 0 if groups == 1 else linears * rank * outputs
    _add_items_times_b[(len(items.item_J2), linears, triton.cdiv(outputs, block))](
        *arguments, places, outputs, of_expert, L=linears, P=parts, R=rank, M=items.size,
        BLOCK_M=block_m, BLOCK_N=block, num_warps=4, **dependent(x),
    )  # fmt: skip
