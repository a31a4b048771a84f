"""What the launchers of the decode kernels share: the LoRA arguments, checks of tensors, launch options.

A kernel that does without an argument is given some other tensor in its place, which it never touches, and a
constant that says so. An object without tensors (`NO_A`, `NO_B`, `NO_SUM`) stands for a linear layer without
an adapter; its constants are the ones with which a kernel leaves LoRA out.

Shapes: R ranks stacked, K in-features, N out-features.
"""

from dataclasses import dataclass

import torch

from qerl.errors import QeRLError
from qerl.kernels.cards import card_of
from qerl.kernels.weights.product import NO_SUM, LoraSum


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

    def constants(self, part: int) -> dict[str, int]:
        """Constants of the kernel that reads the product.

        Args:
            part: Columns of B that it holds at a time.
        """
        return {"R": self.ranks, "PART": part}


NO_B = LoraB()


def pointers(kernel: str, stand_in: torch.Tensor, **tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """The pointer arguments of a launch, in the order given.

    Args:
        kernel: Name of the launcher, for the message.
        stand_in: Passed for each argument that is None.
        tensors: The arguments by the names of the launcher's parameters.

    Raises:
        QeRLError: A tensor is not contiguous: kernels count elements from its first one.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise QeRLError(f"{kernel} was given {name} {_bad_dimension(tensor)}; pass a contiguous tensor.")
    return [stand_in if tensor is None else tensor for tensor in tensors.values()]


def _bad_dimension(tensor: torch.Tensor) -> str:
    expected = 1
    for dimension in reversed(range(tensor.ndim)):
        if tensor.shape[dimension] != 1 and tensor.stride(dimension) != expected:
            return (
                f"of the shape {tuple(tensor.shape)} whose dimension {dimension} has the stride "
                f"{tensor.stride(dimension)} instead of {expected}"
            )
        expected *= tensor.shape[dimension]
    return f"of the shape {tuple(tensor.shape)}"


def dependent(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options: programmatic dependent launch, on the cards that have it."""
    if tensor.is_cuda and card_of(tensor.device).dependent_launch:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def shared_bytes(tensor: torch.Tensor) -> int:
    """Shared memory that a program may have where this tensor is."""
    return card_of(tensor.device).shared_bytes
