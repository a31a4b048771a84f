"""The memory of a GPU that a run may use.

All code that plans or reserves memory asks this module and not the driver: the memory plan, the engine's KV
cache, and, through a limit of torch's allocator, the update. In two cases it is less than the driver says.

`QERL_MEMORY_GB` treats a GPU as one with less memory: `QERL_MEMORY_GB=24` is a card that is sold with 24 GB,
the one that `qerl plan --gpu 24` plans for. Memory of other programs counts as on such a card.

Where CPU and GPU share their memory (DGX Spark, Jetson), the driver calls all of it the GPU's. There a
program that takes it is not refused: the system begins to swap, kills processes or stands still. So a run
takes three quarters, and the rest stays with the system, the page cache of checkpoints and Python's
processes. The driver also counts cached files as used memory; the system says how much of that it would free.
"""

from typing import Any

import torch

from qerl.host_memory import available_bytes, gigabytes

LIMIT = "QERL_MEMORY_GB"
"""Environment variable: GB as vendors count them; a GPU with more memory is treated as one with this much."""

USABLE = 0.99
"""Share of a GPU's GiB that a program can use, beside `DRIVER_BYTES`."""

DRIVER_BYTES = 2**29
"""Bytes that the driver keeps of any GPU. `USABLE` and this leave less than torch reports for a GPU without
error correction in users' reports of memory that ran out, where the least found was 15.45 GiB of 16, 23.41 of
24, 31.34 of 32, 47.37 of 48 and 79.11 of 80; drivers differ by up to 0.3. nvidia-smi shows more, 24564 MiB of
an RTX 4090. Error correction in GDDR memory takes two GiB of 24; only a plan for a card's name counts it."""

UNIFIED_SHARE = 0.75
"""Share that a run takes of a memory common to CPU and GPU."""


def usable_bytes(gigabytes: float) -> int:
    """Bytes that a program can use of a GPU sold with this many GB."""
    return max(0, round(gigabytes * 2**30 * USABLE) - DRIVER_BYTES)


def limit_gb() -> float | None:
    """The value of `QERL_MEMORY_GB`; None where it is not set.

    Raises:
        QeRLError: It is no amount of memory.
    """
    return gigabytes(LIMIT, "a GPU's memory in GB, such as 24")


def is_unified(device: torch.device) -> bool:
    """True if a device's memory is that of the CPU: for the CPU itself, and for a GPU that shares it."""
    if device.type != "cuda":
        return True
    gpu: Any = torch.cuda.get_device_properties(device)
    return bool(gpu.is_integrated)


def total_bytes(device: torch.device) -> int:
    """Bytes of a GPU that a run may plan with.

    Raises:
        QeRLError: `QERL_MEMORY_GB` is no amount of memory.
    """
    gpu: Any = torch.cuda.get_device_properties(device)
    total: int = gpu.total_memory
    if gpu.is_integrated:
        total = round(UNIFIED_SHARE * total)
    gigabytes = limit_gb()
    return total if gigabytes is None else min(total, usable_bytes(gigabytes))


def free_bytes(device: torch.device, freed: int = 0) -> int:
    """Free bytes of :func:`total_bytes`, at the moment or once ``freed`` more are freed."""
    gpu: Any = torch.cuda.get_device_properties(device)
    free = available_bytes() if gpu.is_integrated else torch.cuda.mem_get_info(device)[0]
    return max(0, free + freed - (gpu.total_memory - total_bytes(device)))


def keep_within_limit(device: torch.device) -> None:
    """Limit torch's allocator to the part of :func:`total_bytes` that is not used outside of it.

    The context, captured graphs and the engine's KV cache are outside of it, so this is called again whenever
    their memory has come or gone. Without a limit torch is left as it is.
    """
    gpu: Any = torch.cuda.get_device_properties(device)
    total = total_bytes(device)
    if total < gpu.total_memory:
        for_torch = free_bytes(device) + torch.cuda.memory_reserved(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(for_torch / gpu.total_memory, index)
