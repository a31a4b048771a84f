"""Result files: one schema for all of them, and where it is written and read.

A file is a JSON object of the fields that all its rows share, and ``rows``. Each row, the shared fields
included, says where it comes from:

- ``commit``: of the tree that was measured (`qerl.source`), with `-dirty` where its source was another;
- ``date``: when, as 2026-11-21 or 2026-11-21 20:42 UTC;
- ``command``: what was run, with the options that stand for `QERL_ARCH`, `QERL_MEMORY_GB` and `QERL_HOST_GB`;
- ``gpu``, or ``machine`` where no GPU was measured; ``driver`` and ``clocks_mhz`` where they were read;
- ``arch``, the class of GPUs as one of which it was treated, where `QERL_ARCH` or ``--arch`` named one;
- ``memory_gb``, the memory as one with which it was treated, where `QERL_MEMORY_GB` or ``--memory`` did.

The newest result of a benchmark is NAME-CARD.json. One that it replaces, and that something still refers to,
keeps a file of its own whose name ends in its commit.
"""

import json
import os
from pathlib import Path
from typing import Any

from qerl.gpu_memory import LIMIT
from qerl.host_memory import HOST
from qerl.kernels.cards import ARCH
from qerl.measure.provenance import provenance

RESULTS = Path(__file__).parent / "results"

EVERYWHERE = {"--arch": ARCH, "--memory": LIMIT, "--host": HOST}
"""Options that every benchmark has, and the environment variables that each stands for."""

Row = dict[str, Any]


def write_result(path: Path, command: str, rows: list[Row], program: str = "bench", **shared: Any) -> None:
    """Write a result file, and its folder.

    Args:
        command: Name and options of the benchmark, without the options that every benchmark has.
        program: Module whose benchmark it is.
        shared: Fields that all rows share, beside :func:`provenance`.
    """
    _write(path, {**_provenance(command, program), **shared, "rows": rows})


def add_row(path: Path, command: str, row: Row) -> None:
    """Add a row to a result file of several runs, whose rows each say for themselves where they come from.

    Args:
        path: The file; it need not be there.
        command: As `write_result`.
    """
    kept = _rows(path) if path.exists() else []
    _write(path, {"rows": [*kept, {**_provenance(command, "bench"), **row}]})


def read_rows(name: str) -> list[Row]:
    """Rows of ``results/NAME.json``, each with the fields that it shares with the others."""
    return _rows(RESULTS / f"{name}.json")


def _rows(path: Path) -> list[Row]:
    shared = json.loads(path.read_text())
    return [{**shared, **row} for row in shared.pop("rows")]


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def _provenance(command: str, program: str) -> dict[str, Any]:
    everywhere = {option: os.environ.get(variable, "") for option, variable in EVERYWHERE.items()}
    options = "".join(f" {option} {value}" for option, value in everywhere.items() if value)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    launcher = f"torchrun --nproc_per_node {processes}" if processes > 1 else "python"
    return provenance(f"{launcher} -m {program} {command}{options}")
