"""What launchers ask about a device, and what they put there."""

from functools import cache
from typing import Any

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of the GPU's multiprocessors.

    On a CPU the interpreter of Triton runs one program after another, so every split of an item costs time:
    8 leaves one split to many batch rows and several to few.
    """
    if device.type != "cuda":
        return 8
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def device_words(device: torch.device) -> str:
    """A device as far as it decides how sums are cut, and so their last bits."""
    if device.type != "cuda":
        return "the CPU"
    return f"{torch.cuda.get_device_name(device)} with {multiprocessors(device)} multiprocessors"


@cache
def l2_bytes(device: torch.device) -> int:
    """Size of a GPU's L2 cache."""
    properties: Any = torch.cuda.get_device_properties(device)
    size: int = properties.L2_cache_size
    return size


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device; the host goes on at once.

    `tensor.to("cuda")` copies from memory that the system may move, so it returns only once the GPU has done
    all that was asked of it before. From pinned memory the copy waits in line like any other work. torch
    keeps the pinned memory until the copy is done, and uses it again.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
