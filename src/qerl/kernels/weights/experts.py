"""Stacked weights of a layer's experts, and products of items with them.

An item (`qerl.kernels.decode.route`) is an expert with some of its tokens. For each item, a product
multiplies the item's tokens by the expert's weight. Four-bit experts are multiplied by packed_gemm.cu, from
the same tiles as other weights; 16-bit experts, and all experts in Triton's interpreter, by the kernel of
this file.

Shapes: E experts, J items, M places of an item, S = J M, N outputs of an expert, K inputs, L linears stacked
in it.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import triton
import triton.language as tl

from qerl.kernels.cards import card_of
from qerl.kernels.decode.common import begin
from qerl.kernels.decode.route import Items
from qerl.kernels.launch import dependent, pointers
from qerl.kernels.limits import ITEM_SIZES
from qerl.kernels.weights.packed_gemm import packed_gemm_of_items, tiling_of_items
from qerl.kernels.weights.tiles import Tiles


class ExpertWeights(Protocol):
    """The weights [N, K] of E experts.

    Attributes:
        shape: (N, K) of an expert.
        scale_EL: fp32, the factor of each linear's outputs.
        in_order: Whether operands are in the order of packed_gemm.cu, else [M, K].
        sizes: Possible values of an item's M, ascending.
    """

    in_order: ClassVar[bool]
    sizes: ClassVar[tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def scale_EL(self) -> torch.Tensor: ...

    def multiply(self, x: torch.Tensor, items: Items, out_SN: torch.Tensor) -> None:
        """Write x w^T without the factors, fp32; empty places are left as they are.

        Args:
            x: M rows of K numbers per item, see `in_order`.
            items: The items.
            out_SN: fp32, written.
        """
        ...


@dataclass(frozen=True, eq=False)
class NVFP4Experts:
    """Experts in NVFP4; an `ExpertWeights`.

    Attributes:
        tiles: Tiles of all experts, [E N, K].
    """

    tiles: Tiles
    scale_EL: torch.Tensor
    shape: tuple[int, int]
    in_order: ClassVar[bool] = True
    sizes: ClassVar[tuple[int, ...]] = ITEM_SIZES

    def multiply(self, x: torch.Tensor, items: Items, out_SN: torch.Tensor) -> None:
        """See `ExpertWeights.multiply`."""
        pairs = items.place_TC.numel()
        tiling = tiling_of_items(items.size, pairs, card_of(x.device), self.shape)
        packed_gemm_of_items(x, self.tiles, items.item_J2, items.count_1, out_SN, tiling, items.size)


@dataclass(frozen=True, eq=False)
class DenseExperts:
    """Experts in 16 bits, or in fp32 in Triton's interpreter; an `ExpertWeights`."""

    weight_ENK: torch.Tensor
    scale_EL: torch.Tensor
    in_order: ClassVar[bool] = False
    sizes: ClassVar[tuple[int, ...]] = (16, 64)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of an expert."""
        return self.weight_ENK.shape[1], self.weight_ENK.shape[2]

    def multiply(self, x: torch.Tensor, items: Items, out_SN: torch.Tensor) -> None:
        """See `ExpertWeights.multiply`."""
        rows, width = self.shape
        block_n = 64
        arguments = pointers(
            "multiply", x, x=x, weight_ENK=self.weight_ENK, item_J2=items.item_J2, count_1=items.count_1,
            out_SN=out_SN,
        )  # fmt: skip
        _product_of_items[(triton.cdiv(rows, block_n), len(items.item_J2))](
            *arguments, rows, width, M=items.size, BLOCK_N=block_n, BLOCK_K=64, num_warps=4, **dependent(x)
        )


@triton.jit
def _product_of_items(
    x, weight_ENK, item_J2, count_1, out_SN, N, K,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, in_n = tl.arange(0, M), n < N
    begin(PDL)
    if item < tl.load(count_1):
        expert, used = tl.load(item_J2 + item * 2).to(tl.int64), tl.load(item_J2 + item * 2 + 1)
        in_m = m < used
        total = tl.zeros([M, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            in_k = k < K
            at = x + (item * M + m)[:, None] * K + k[None, :]
            rows = tl.load(at, mask=in_m[:, None] & in_k[None, :], other=0.0)
            at = weight_ENK + (expert * N + n)[None, :] * K + k[:, None]
            weight = tl.load(at, mask=in_k[:, None] & in_n[None, :], other=0.0)
            total += tl.dot(rows, weight, out_dtype=tl.float32)
        at = out_SN + (item * M + m)[:, None] * N + n[None, :]
        tl.store(at, total, mask=in_m[:, None] & in_n[None, :])
