"""Provenance fields of a result, and queries of the driver.

nvidia-smi numbers all GPUs of the machine. CUDA numbers those that CUDA_VISIBLE_DEVICES leaves, in an order
of its own, so their indices differ. Both know a GPU's address on the PCI bus, which a slice of it (MIG)
shares, unlike a UUID.
"""

import os
import subprocess
from datetime import UTC, datetime
from typing import Any

import torch

from qerl.gpu_memory import limit_gb
from qerl.kernels.cards import ARCH
from qerl.source import commit


def nvidia_smi(fields: str) -> list[str]:
    """Return the command that prints fields of torch's current device as one line of numbers.

    Args:
        fields: As ``nvidia-smi --help-query-gpu`` names them, with commas between.

    Raises:
        RuntimeError: There is no CUDA device.
    """
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # torch's stub lacks its place
    place = f"{gpu.pci_domain_id:08X}:{gpu.pci_bus_id:02X}:{gpu.pci_device_id:02X}.0"
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={place}"]


def provenance(command: str) -> dict[str, Any]:
    """Return the fields that record what produced a result of ``command``, on this machine's GPU if there is
    one, else on its CPU."""
    if torch.cuda.is_available():
        measured = {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "clocks_mhz": _clocks()}
    else:
        measured = {"machine": f"{os.cpu_count()} CPU cores, torch on {torch.get_num_threads()} of them"}
    return {
        **measured,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **({"arch": os.environ[ARCH]} if os.environ.get(ARCH) else {}),
        **({"memory_gb": limit_gb()} if limit_gb() is not None else {}),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
    }


def _clocks() -> dict[str, int] | None:
    """The current clocks of the GPU in use; None if nvidia-smi fails."""
    try:
        sm, memory = map(int, _query("clocks.sm,clocks.mem").split(","))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return {"sm": sm, "memory": memory}


def _driver() -> str | None:
    """The driver's version; None where nvidia-smi fails."""
    try:
        return _query("driver_version")
    except (OSError, subprocess.CalledProcessError):
        return None


def _query(fields: str) -> str:
    return subprocess.run(nvidia_smi(fields), capture_output=True, text=True, check=True).stdout.strip()
