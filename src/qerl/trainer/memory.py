"""The peak of memory that a step had in use.

On a GPU that is what the device says, CUDA's context included: keys and values of the paged engine do not
pass through torch's allocator, so its own statistics would leave out the larger half of a rollout.
"""

import resource
import sys

import torch

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in one of what `ru_maxrss` counts: 1 on macOS, 1024 on Linux."""


def used_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU, by any process; on the CPU the largest number that this process has had."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


class PeakMemory:
    """The largest of the readings taken since the last report.

    Args:
        device: Where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0

    def read(self) -> None:
        """Take a reading; torch keeps what it has freed, so one at the end of an update shows its peak."""
        self._peak = max(self._peak, used_bytes(self._device))

    def report_gb(self) -> float:
        """The peak since the last report, in 10^9 bytes."""
        self.read()
        peak, self._peak = self._peak, 0
        return peak / 1e9
