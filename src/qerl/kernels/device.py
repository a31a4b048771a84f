"""Properties of a device that launchers need."""

from functools import cache
from typing import Any

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of the GPU's multiprocessors, or 8 for a CPU.

    On a CPU Triton's interpreter runs one program after another, so every split of an item costs time: 8
    makes one split for many batch rows and several for few.
    """
    if device.type != "cuda":
        return 8
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def device_words(device: torch.device) -> str:
    """Name a device with all that decides how sums are split, and so their last bits."""
    if device.type != "cuda":
        return "the CPU"
    return f"{torch.cuda.get_device_name(device)} with {multiprocessors(device)} multiprocessors"


@cache
def l2_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)
    size: int = properties.L2_cache_size
    return size
