"""The LoRA arguments of the decode kernels' launchers.

A kernel that does without an argument is given some other tensor in its place, which it never touches, and a
constant that says so. An object without tensors (`NO_A`, `NO_B`, `NO_SUM`) stands for a linear layer without
an adapter; its constants are the ones with which a kernel leaves LoRA out.

Shapes: R ranks stacked, K in-features, N out-features.
"""

from dataclasses import dataclass

import torch

from qerl.kernels.weights.product import NO_SUM, LoraSum

FEW_TOKENS = 8
"""Tokens up to which tiles are of 8 tokens: what a tile lacks of its tokens is computed all the same."""


def block_of_tokens(tokens: int) -> int:
    """Tokens of a tile in a step of so many. More than 16 at once would spill registers."""
    return 8 if tokens <= FEW_TOKENS else 16


@dataclass(frozen=True)
class LoraA:
    """What the kernel that makes x leaves for the product after it.

    Attributes:
        a_RK: A of the product's linear layers on top of each other, bf16.
        xa: The sum x A^T, of which the kernel writes the parts.
    """

    a_RK: torch.Tensor | None = None
    xa: LoraSum = NO_SUM

    @property
    def ranks(self) -> int:
        """R; 0 without an adapter."""
        return 0 if self.a_RK is None else self.a_RK.shape[0]

    def constants(self, part: int) -> dict[str, int]:
        """Constants of the kernel that makes x.

        Args:
            part: Rows of A that it holds at a time.
        """
        return {"A_RANKS": self.ranks, "A_PART": part}


NO_A = LoraA()


@dataclass(frozen=True)
class LoraB:
    """What the kernel that reads a product adds to it.

    Attributes:
        xa: The product's sum x A^T, whose parts the product has added.
        b_NR: B of the product's linear layers on top of each other, bf16, scaled by alpha / r.
    """

    xa: LoraSum = NO_SUM
    b_NR: torch.Tensor | None = None

    @property
    def ranks(self) -> int:
        """Ranks of one linear layer; 0 without an adapter."""
        return 0 if self.b_NR is None else self.b_NR.shape[1]

    @property
    def columns(self) -> int:
        """Columns of x A^T, those of other narrow linears behind LoRA's among them; 0 without any."""
        return 0 if self.xa.sum_TR is None else self.xa.sum_TR.shape[1]

    def constants(self, part: int) -> dict[str, int]:
        """Constants of the kernel that reads the product.

        Args:
            part: Columns of B that it holds at a time.
        """
        return {"R": self.ranks, "PART": part}


NO_B = LoraB()
