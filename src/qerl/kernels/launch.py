"""Tensor checks and launch options for the launchers of Triton kernels."""

import torch

from qerl.errors import QeRLError
from qerl.kernels.cards import card_of


def pointers(kernel: str, stand_in: torch.Tensor, **tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the pointer arguments of a launch, in the order given.

    Args:
        kernel: Name of the launcher, for the message.
        stand_in: Passed for each argument that is None.
        tensors: The arguments, by the names of the launcher's parameters.

    Raises:
        QeRLError: A tensor is not contiguous: kernels index from its first element, without strides.
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
    """Return the bytes of shared memory that a program may use on this tensor's device."""
    return card_of(tensor.device).shared_bytes
