"""LoRA arguments of the decode kernels' launchers.

A kernel that does not use an argument gets some other tensor in its place, which it never touches, and a
constant that says so. An object without tensors (`NO_A`, `NO_B`, `NO_SUM`) stands for a linear layer without
an adapter; with its constants a kernel leaves LoRA out.

Shapes: R ranks stacked, K in-features, N out-features.
"""

from dataclasses import dataclass

import torch

from qerl.kernels.weights.product import NO_SUM, LoraSum


@dataclass(frozen=True)
class LoraA:
    """LoRA inputs and outputs of the kernel that makes x, for the product after it.

    Attributes:
        a_RK: Stacked A of the product's linear layers, bf16.
        xa: The sum x A^T, whose parts the kernel writes.
    """

    a_RK: torch.Tensor | None = None
    xa: LoraSum = NO_SUM

    @property
    def ranks(self) -> int:
        """R; 0 without an adapter."""
        return 0 if self.a_RK is None else self.a_RK.shape[0]

    def constants(self, part: int) -> dict[str, int]:
        """Return the constants of the kernel that makes x.

        Args:
            part: Rows of A that the kernel holds at a time.
        """
        return {"A_RANKS": self.ranks, "A_PART": part}


NO_A = LoraA()


@dataclass(frozen=True)
class LoraB:
    """LoRA terms that the kernel that reads a product adds to it.

    Attributes:
        xa: The product's sum x A^T, whose parts the product has added.
        b_NR: Stacked B of the product's linear layers, bf16, scaled by alpha / r.
    """

    xa: LoraSum = NO_SUM
    b_NR: torch.Tensor | None = None

    @property
    def ranks(self) -> int:
        """Ranks of one linear layer; 0 without an adapter."""
        return 0 if self.b_NR is None else self.b_NR.shape[1]

    @property
    def columns(self) -> int:
        """Columns of x A^T, including those of other narrow linears after LoRA's; 0 without any."""
        return 0 if self.xa.sum_TR is None else self.xa.sum_TR.shape[1]

    def constants(self, part: int) -> dict[str, int]:
        """Return the constants of the kernel that reads the product.

        Args:
            part: Columns of B that the kernel holds at a time.
        """
        return {"R": self.ranks, "PART": part}


NO_B = LoraB()
