"""Stacked unquantised weights, multiplied by cuBLAS.

Shapes: T tokens, N outputs, K inputs, L stacked linears.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qerl.kernels.weights.product import NO_SUM, LoraSum, Product


@dataclass(frozen=True, eq=False)
class DenseStack:
    """One or several 16-bit weights; a `qerl.kernels.weights.product.GemmWeight`.

    Attributes:
        weight_NK: 16-bit, or fp32 in Triton's interpreter.
        scale_L: fp32 [L], the factor of each linear's outputs: ones for the layers of a model.
    """

    weight_NK: torch.Tensor
    scale_L: torch.Tensor

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> "DenseStack":
        """Stack the weights of layers, and turn the layers' own into views; a single weight stays where it
        is."""
        weights = [layer.weight.data for layer in layers]
        stacked_NK = torch.cat(weights) if len(weights) > 1 else weights[0]
        if len(layers) > 1:
            views = stacked_NK.split([layer.out_features for layer in layers])
            for layer, view in zip(layers, views, strict=True):
                layer.weight.data = view
        return cls(stacked_NK, torch.ones(len(layers), device=stacked_NK.device))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight_NK.shape[0], self.weight_NK.shape[1]

    def padded_tokens(self, tokens: int) -> int:
        """0: the operand is [T, K]."""
        return 0

    def scratch_bytes(self, tokens: int) -> int:
        """Return the bytes of the product."""
        return tokens * self.weight_NK.shape[0] * self.weight_NK.element_size()

    def multiply(self, x: torch.Tensor, tokens: int, scratch: torch.Tensor, xa: LoraSum = NO_SUM) -> Product:
        """x w^T; see `GemmWeight.multiply`."""
        xa.add()
        rows, width = self.weight_NK.shape
        x_TK = x.view(-1)[: tokens * width].view(tokens, width)
        out_STN = scratch[: tokens * rows * x.element_size()].view(x.dtype).view(1, tokens, rows)
        torch.mm(x_TK, self.weight_NK.T, out=out_STN[0])
        return Product(out_STN, None, self.scale_L)
