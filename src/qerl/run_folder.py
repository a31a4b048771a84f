"""Layout of a run folder, and functions that read and write its records.

    runs/x/
      config.yaml            settings of the run, resolved
      metrics.jsonl          one JSON object per log call
      completions/           tables of what was sampled, with log_completions, one for each logged step
      adapter_model.safetensors, adapter_config.json, policy.json     what was trained, at the end
      checkpoint-N/          the same after N steps, with optimizer, rollouts and checkpoint.json
      .unfinished/           a checkpoint or the final model while it is written
      eval/result.json       scores, where `qerl eval` is told to put them

Training writes this folder, evaluation and report read it. None of the three imports another for it, and
nothing here needs torch.

The records of a run that is still going, or was killed, can be read: the last line of its metrics may be cut
off, which is logged. Any other line that is not a metric line is an error, because a curve with silent holes
would be believed.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from qerl import yaml12
from qerl.atomic import write_whole
from qerl.errors import QeRLError

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"

POLICY_FILE = "policy.json"
"""File beside saved weights, with facts that settings lack, see `qerl.trainer.resume.provenance`."""

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
"""Names that PEFT gives to the files of an adapter."""

MANIFEST_FILE = "checkpoint.json"
"""Last file of a checkpoint, which lists all others."""

COMPLETIONS_FOLDER = "completions"
"""Name that TRL gives to the folder of tables of completions."""

UNFINISHED = ".unfinished"
"""Folder of a run in which checkpoints and the final model are written before they are renamed."""

LARGEST = 1e100
"""A run whose numbers are beyond this has diverged; no axis and no step reaches it."""

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TABLE = re.compile(r"(?:(.+)_)?completions_(\d+)\.parquet")


def checkpoint_step(folder: Path) -> int | None:
    """Steps in a checkpoint's name, None for a folder of another name."""
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run by step, without those whose writing or deletion was cut off."""
    found = [(checkpoint_step(path), path) for path in run.glob("checkpoint-*")]
    whole = [(step, path) for step, path in found if step is not None and (path / MANIFEST_FILE).is_file()]
    return [path for _, path in sorted(whole)]


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run, None where there is none."""
    return next(reversed(checkpoints(run)), None)


def policy_folders(run: Path) -> tuple[Path, ...]:
    """Return the folders that may hold the settings of the run that saved a policy: its own folder, and for a
    checkpoint also the one above."""
    return (run,) if checkpoint_step(run) is None else (run, run.absolute().parent)


def path_labels(folders: Sequence[Path], what: str) -> list[str]:
    """The shortest ends of the folders' paths that tell them apart; ``what`` names them in an error.

    Raises:
        QeRLError: A folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise QeRLError(f"The {what} {folder} is given more than once; name each {what} once.")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise AssertionError("different paths have different parts")


def table_path(run: Path, step: int, evaluation: str = "") -> Path:
    """Return the path of a step's table of completions, with TRL's name; for an evaluation its prefix comes
    first."""
    name = f"completions_{step:05d}.parquet"
    return run / COMPLETIONS_FOLDER / (f"{evaluation}_{name}" if evaluation else name)


def table_paths(run: Path) -> dict[str, dict[int, Path]]:
    """Tables of completions by evaluation ("" is training) and step, in the order of the steps."""
    found = []
    for path in run.glob(f"{COMPLETIONS_FOLDER}/*.parquet"):
        if match := _TABLE.fullmatch(path.name):
            found.append((match[1] or "", int(match[2]), path))
    tables: dict[str, dict[int, Path]] = {}
    for evaluation, step, path in sorted(found):
        tables.setdefault(evaluation, {})[step] = path
    return tables


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Metrics of a run, in the order in which they were logged.

    Returns:
        One dict per log call with "step" and the keys that were logged; empty before the first one.

    Raises:
        QeRLError: There is no metrics file, or a line before its last is not a JSON object with a step.
    """
    path = run / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise QeRLError(
            f"{run} has no {METRICS_FILE}; name the output_dir of a run (a trainer made in Python writes one "
            "with the callback MetricsFile of qerl.trainer.callbacks)."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise QeRLError(f"{path} cannot be read ({cause}); copy the folder again.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number == len(lines):
            logger.warning("The last line of %s is cut off; it is left out.", path)
        else:
            raise QeRLError(
                f"Line {number} of {path} is not a JSON object with a step; the file is damaged there, "
                "delete that line to go on."
            )
    return rows


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and abs(step) < LARGEST else None


def write_metrics(run: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace the metrics of a run by these rows, whole or not at all."""
    write_whole(run / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in rows))


def append_metrics(run: Path, row: dict[str, Any]) -> None:
    """Add one row, which has a "step", to the metrics of a run."""
    with (run / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in a folder's config.yaml, None where there is no such file.

    Raises:
        QeRLError: The file cannot be read or is no mapping.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        settings = yaml12.load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QeRLError(
            f"{path} cannot be read ({' '.join(str(error).split())}); restore it or delete it."
        ) from error
    if not isinstance(settings, dict):
        raise QeRLError(f"{path} is not a mapping of settings; restore it or delete it.")
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, an empty one where there is no file.

    Raises:
        QeRLError: The file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise QeRLError(f"{path} cannot be read ({error}); copy the folder again.") from error
    if not isinstance(content, dict):
        raise QeRLError(f"{path} is not a JSON object; copy the folder again.")
    return content


Result = TypeVar("Result")


def read_result(folder: Path, kind: type[Result]) -> Result:
    """The result of the evaluation in a folder, as a dataclass ``kind`` with some of its fields.

    Raises:
        QeRLError: The file cannot be read, or lacks one of the fields.
    """
    path = folder / RESULT_FILE
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        cause: object = error
        if isinstance(error, ValidationError):
            fault = error.errors(include_url=False)[0]
            cause = ": ".join([".".join(map(str, fault["loc"])), fault["msg"]]).removeprefix(": ")
        raise QeRLError(f"{path} is not the result of an evaluation ({cause}); remove it.") from error


def read_policy(folder: Path) -> dict[str, Any]:
    """The content of policy.json beside saved weights, empty where there is none.

    Raises:
        QeRLError: The file cannot be read.
    """
    return read_json(folder / POLICY_FILE)
