"""Result files: one schema for all of them, and where it is written and read.

A file is a JSON object of the fields that all its rows share, and ``rows``. Each row, the shared fields
included, says where it comes from:

- ``commit``: of the tree that was measured (`qerl.source`), with `-dirty` where its source was another;
- ``date``: when, as 2026-11-21 or 2026-11-21 20:42 UTC;
- ``command``: what was run;
- ``gpu``, or ``machine`` where no GPU was measured; ``clocks_mhz`` of the GPU where they were read;
- ``arch``, the class of GPUs as one of which it was treated, where `QERL_ARCH` or ``--arch`` named one;
- ``memory_gb``, the memory as one with which it was treated, where `QERL_MEMORY_GB` or ``--memory`` did.

The newest result of a benchmark is NAME-CARD.json. One that it replaces, and that something still refers to,
keeps a file of its own whose name ends in its commit.
"""

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qerl.gpu_memory import limit_gb
from qerl.kernels.cards import ARCH
from qerl.source import commit

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def provenance(command: str) -> dict[str, Any]:
    """The fields that say what produced a result on this machine's GPU, or on its CPU if it has none."""
    if torch.cuda.is_available():
        measured = {"gpu": torch.cuda.get_device_name(), "clocks_mhz": _clocks()}
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
        "command": f"python -m bench {command}",
    }


def _clocks() -> dict[str, int] | None:
    """The present clocks of the first GPU, None where nvidia-smi does not say them."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits", "--id=0"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        sm, memory = map(int, found.stdout.split(","))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return {"sm": sm, "memory": memory}


def write_result(path: Path, command: str, rows: list[Row], **shared: Any) -> None:
    """Write a result file, and its folder.

    Args:
        command: Name and options of the benchmark.
        shared: Fields that all rows share, beside :func:`provenance`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(command), **shared, "rows": rows}, indent=1) + "\n")


def read_rows(name: str) -> list[Row]:
    """Rows of ``results/NAME.json``, each with the fields that it shares with the others."""
    shared = json.loads((RESULTS / f"{name}.json").read_text())
    return [{**shared, **row} for row in shared.pop("rows")]
