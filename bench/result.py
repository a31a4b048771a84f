"""Result files: their common schema, and functions to write and read them.

A file is a JSON object of the fields that all its rows share, and ``rows``. Each row, together with the
shared fields, has its provenance:

- ``commit``: the measured commit (`qerl.source`), with `-dirty` if the source differed from it;
- ``date``: as 2026-11-21 or 2026-11-21 20:42 UTC;
- ``command``: the command line, with the options for `QERL_ARCH`, `QERL_MEMORY_GB` and `QERL_HOST_GB`;
- ``gpu``, or ``machine`` if no GPU was measured; ``driver`` and ``clocks_mhz`` if they were read;
- ``arch``: the class of GPUs that `QERL_ARCH` or ``--arch`` named, if one of them did;
- ``memory_gb``: the GPU memory that `QERL_MEMORY_GB` or ``--memory`` named, if one of them did.

The newest result of a benchmark is NAME-CARD.json. A replaced result that is still referred to keeps a file
of its own whose name ends in its commit.
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
"""Options of every benchmark, and the environment variable that each sets."""

Row = dict[str, Any]


def write_result(path: Path, command: str, rows: list[Row], program: str = "bench", **shared: Any) -> None:
    """Write a result file; its folder is created.

    Args:
        path: The file.
        command: Name and options of the benchmark, without those of every benchmark (`EVERYWHERE`).
        rows: Fields of each row.
        program: Module that was run.
        shared: Fields that all rows share, besides :func:`provenance`.
    """
    _write(path, {**_provenance(command, program), **shared, "rows": rows})


def add_row(path: Path, command: str, row: Row) -> None:
    """Append a row to a result file of several runs, in which each row has its own provenance.

    Args:
        path: The file; created if it does not exist.
        command: As in `write_result`.
        row: Fields of the row.
    """
    kept = _rows(path) if path.exists() else []
    _write(path, {"rows": [*kept, {**_provenance(command, "bench"), **row}]})


def read_rows(name: str) -> list[Row]:
    """Return the rows of ``results/NAME.json``, each with the shared fields."""
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
