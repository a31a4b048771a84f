"""The folder of a probe: what is measured, and who measures what.

    FOLDER/
      probe.json             the probe with every default, and the fingerprint of its model
      cells/NAME.json        a measured cell
      jobs/NAME.lock         held by the process that computes the job's cells
      policies/step_N/       adapters of the clean run, where the probe trains one
      results.json.gz        all cells that were measured when a process ended
      probe.html             the page, made from results.json.gz

A cell's file is written aside and renamed: it is whole or not there, and a cell that has one is never
measured again. Several processes, on several GPUs, may work in one folder: each claims a job by a lock that
the system releases when the process ends, however it ends.
"""

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

from filelock import FileLock

from lab.study.files import claimed
from qerl.atomic import write_whole
from qerl.errors import QeRLError
from qerl.run_folder import read_json

PROBE_FILE, RESULTS_FILE, PAGE_FILE = "probe.json", "results.json.gz", "probe.html"

Cell = dict[str, Any]


class Store:
    """The folder of one probe.

    Args:
        folder: The folder, which is made.
        head: What all cells share: the probe's values and its model's fingerprint.

    Attributes:
        head: The same as plain values.

    Raises:
        QeRLError: The folder holds another probe, or cannot be written.
    """

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self.folder = folder
        self.head = head = json.loads(json.dumps(head))
        try:
            for part in ("cells", "jobs"):
                (folder / part).mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "jobs" / "probe.lock"):
                old = read_json(folder / PROBE_FILE)
                differ = [key for key in head if _fixed(old.get(key, head[key])) != _fixed(head[key])]
                if differ or (not old and any((folder / "cells").iterdir())):
                    why = f": its {differ[0]} is another one" if differ else ""
                    raise QeRLError(f"{folder} holds another probe{why}; choose another --output_dir.")
                write_whole(folder / PROBE_FILE, (json.dumps(head, indent=1) + "\n").encode())
        except OSError as error:
            raise QeRLError(
                f"{folder} cannot be written: {error.strerror}; choose another --output_dir."
            ) from error

    @classmethod
    def opened(cls, folder: Path) -> "Store":
        """The probe that a folder holds.

        Raises:
            QeRLError: It holds none.
        """
        head = read_json(folder / PROBE_FILE)
        if not head:
            raise QeRLError(f"{folder} holds no probe; name the folder of one.")
        return cls(folder, head)

    def has(self, name: str) -> bool:
        """Whether a cell is measured."""
        return self._path(name).is_file()

    def write(self, name: str, cell: Cell) -> None:
        """Keep a cell."""
        write_whole(self._path(name), (json.dumps(cell, allow_nan=False) + "\n").encode())

    def read(self, name: str) -> Cell:
        """A cell.

        Raises:
            QeRLError: Its file is damaged.
        """
        try:
            return json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise QeRLError(
                f"{self._path(name)} is damaged ({error}); delete it, and it is measured again."
            ) from error

    def claimed(self, job: str) -> contextlib.AbstractContextManager[bool]:
        """A block in which no other process computes a job; false where another one does already."""
        return claimed(self.folder / "jobs" / f"{job}.lock")

    def write_results(self, results: dict[str, Any]) -> Path:
        """Write the results of all cells into one file."""
        path = self.folder / RESULTS_FILE
        write_whole(path, gzip.compress(json.dumps(results, allow_nan=False).encode(), mtime=0))
        return path

    def _path(self, name: str) -> Path:
        return self.folder / "cells" / f"{name}.json"


def refuse_results_alone(folder: Path) -> None:
    """Nothing where a folder may be measured in.

    Raises:
        QeRLError: It has results, which would be written over, but none of the cells that they are made of.
    """
    if (folder / RESULTS_FILE).exists() and not any(folder.glob("cells/*.json")):
        raise QeRLError(
            f"{folder} has {RESULTS_FILE} without the cells and adapters that a probe goes on from, and it "
            "would be written over; choose another --output_dir."
        )


def read_results(file: Path) -> dict[str, Any]:
    """The content of a file of results.

    Raises:
        QeRLError: There are none, or they are damaged.
    """
    try:
        return json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise QeRLError(
            f"{file} holds no results of a probe ({error}); name a probe's folder or its results."
        ) from error


def _fixed(value: Any) -> Any:
    """What must be the same for all cells: not how many rows are computed at once."""
    return {k: v for k, v in value.items() if k != "batch_rows"} if isinstance(value, dict) else value
