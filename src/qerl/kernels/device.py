"""What launchers ask about a device."""

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of the GPU's multiprocessors; that of an H100 on a CPU, where Triton's interpreter plays one."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
