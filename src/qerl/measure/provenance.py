"""The fields that say what produced a result."""

import os
import subprocess
from datetime import UTC, datetime
from typing import Any

import torch

from qerl.gpu_memory import limit_gb
from qerl.kernels.cards import ARCH
from qerl.measure.driver import nvidia_smi
from qerl.source import commit


def provenance(command: str) -> dict[str, Any]:
    """The fields that say what produced a result on this machine's GPU, or on its CPU if it has none.

    Args:
        command: What was run.
    """
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
    """The present clocks of the GPU in use, None where nvidia-smi does not say them."""
    try:
        sm, memory = map(int, _query("clocks.sm,clocks.mem").split(","))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return {"sm": sm, "memory": memory}


def _driver() -> str | None:
    """The driver's version, None where nvidia-smi does not say it."""
    try:
        return _query("driver_version")
    except (OSError, subprocess.CalledProcessError):
        return None


def _query(fields: str) -> str:
    return subprocess.run(nvidia_smi(fields), capture_output=True, text=True, check=True).stdout.strip()
