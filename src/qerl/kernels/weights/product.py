"""What a forward pass of the paged engine asks of a weight, whatever its format: a product with a batch.

A weight here is that of several linear layers stacked along their outputs (q, k and v; gate and up) or of
one. Each format is a class of its own: `qerl.kernels.weights.nvfp4`, `nf4` and `dense`. Another format is
another class with these four members.

Shapes: S partial sums, T tokens, N outputs of all stacked linears, K inputs, L stacked linears, P programs
that have a part of x A^T, R ranks stacked.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class LoraSum:
    """The sum x A^T of one product.

    Attributes:
        parts_PTR: fp32 [P, T, R]. Each program of the kernel that makes x writes the part that its columns of
            x have in the sum; the next product's kernels write over it.
        sum_TR: fp32 [T, R], written with the product and read by the kernel that reads the product.
    """

    parts_PTR: torch.Tensor | None = None
    sum_TR: torch.Tensor | None = None

    def add(self) -> None:
        """Add the parts in order, in a launch of its own: for products whose kernel does not."""
        if self.parts_PTR is not None and self.sum_TR is not None:
            from qerl.kernels.weights.add_parts import add_parts  # Triton, without which this module loads

            add_parts(self.parts_PTR, self.sum_TR)


NO_SUM = LoraSum()
"""That of a product without an adapter."""


@dataclass(frozen=True, eq=False)
class Product:
    """The result of a product, as the kernel that computed it left it; the kernel that reads it finishes it.

    The finished product is the sum of the partial sums, times the scale of the linear that a column belongs
    to.

    Attributes:
        out_STN: fp32 or the activations' dtype [S, T, N], partial sums.
        partials_G: int32 [N/64], how many of the S each 64 columns have, the others being undefined; None if
            S is 1.
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
        """Tokens for which the operand has room if it is wanted in packed_gemm.cu's order; 0 if [T, K]."""
        ...

    def scratch_bytes(self, tokens: int) -> int:
        """Bytes of scratch that :meth:`multiply` needs for so many tokens."""
        ...

    def multiply(self, x: torch.Tensor, tokens: int, scratch: torch.Tensor, xa: LoraSum = NO_SUM) -> Product:
        """x w^T, in ``scratch`` where the kernel takes a place for its output, and the sum x A^T.

        Args:
            x: 16-bit activations, contiguous, flat or not, in the order that :meth:`padded_tokens` says.
            tokens: T.
            scratch: uint8, at least :meth:`scratch_bytes` long; its content is the product until the next
                one.
            xa: Of the adapters of the stacked linears; its parts are there, and its sum is written.
        """
        ...
