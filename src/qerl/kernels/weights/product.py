"""Interface of a weight in the paged engine's forward pass, whatever its format: a product with a batch.

A weight here is that of one linear layer, or of several stacked along their outputs (q, k and v; gate and
up). Each format is a class of its own: `qerl.kernels.weights.nvfp4`, `nf4` and `dense`. A new format is
another class with these four members.

Shapes: S partial sums, T tokens, N outputs of all stacked linears, K inputs, L stacked linears, P programs
that each write a part of x A^T, R stacked ranks.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class LoraSum:
    """The sum x A^T of one product.

    Attributes:
        parts_PTR: fp32 [P, T, R]. Each program of the kernel that makes x writes the part of its columns of
            x; the next product's kernels overwrite it.
        sum_TR: fp32 [T, R], written with the product and read by the kernel that reads the product.
    """

    parts_PTR: torch.Tensor | None = None
    sum_TR: torch.Tensor | None = None

    def add(self) -> None:
        """Add the parts in order in a separate launch, for products whose own kernel does not."""
        if self.parts_PTR is not None and self.sum_TR is not None:
            from qerl.kernels.weights.add_parts import add_parts  # needs Triton, this module does not

            add_parts(self.parts_PTR, self.sum_TR)


NO_SUM = LoraSum()
"""The `LoraSum` of a product without an adapter."""


@dataclass(frozen=True, eq=False)
class Product:
    """The result of a product as its kernel left it, to be finished by the kernel that reads it.

    The finished product is the sum of the partial sums, times the scale of the linear that a column belongs
    to.

    Attributes:
        out_STN: fp32 or the activations' dtype [S, T, N], partial sums.
        partials_G: int32 [N/64], how many of the S partial sums each 64 columns have, the others being
            undefined; None if S is 1.
        scale_L: fp32 [L], the factor of each linear's columns.
    """

    out_STN: torch.Tensor
    partials_G: torch.Tensor | None
    scale_L: torch.Tensor


class GemmWeight(Protocol):
    """A weight [N, K] that can be multiplied with a batch of activations.

    Attributes:
        shape: (N, K); N with padding where the format has it.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    def padded_tokens(self, tokens: int) -> int:
        """Return the tokens that the operand has room for in packed_gemm.cu's order; 0 if it is [T, K]."""
        ...

    def scratch_bytes(self, tokens: int) -> int:
        """Return the bytes of scratch that :meth:`multiply` needs for this many tokens."""
        ...

    def multiply(self, x: torch.Tensor, tokens: int, scratch: torch.Tensor, xa: LoraSum = NO_SUM) -> Product:
        """Return x w^T, in ``scratch`` if the kernel takes an output buffer, and write the sum x A^T.

        Args:
            x: 16-bit activations, contiguous, flat or not, in the order that :meth:`padded_tokens` implies.
            tokens: T.
            scratch: uint8, at least :meth:`scratch_bytes` long; holds the product until the next one.
            xa: LoRA sum of the stacked linears; its parts are read, and its sum is written.
        """
        ...
