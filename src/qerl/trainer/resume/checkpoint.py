"""Checkpoint folders: whole, or not there.

A checkpoint is written into a folder aside and renamed once every process has written its part, so whatever
ends a run in the middle of saving, each `checkpoint-N` is whole and none was given up for one that is not.
Its last file lists all others with their sizes: one that a copy, a full disk or a power failure has cut short
is found before anything is loaded, and the one before it is named. The settings lie beside it, because a
resume is checked against them (`qerl.trainer.resume.changes`).

Given up: flushing to the disk. A process that is killed loses nothing by that; after a power failure the
sizes tell.
"""

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from qerl.errors import QeRLError
from qerl.report.runs import CONFIG_FILE

MANIFEST = "checkpoint.json"
UNFINISHED = ".unfinished"
"""Folder of a run in which checkpoints and the final model are written before they are renamed."""

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: Optimizer steps done.
        processes: Processes of the run that saved it.
        files: Sizes in bytes by path within the folder.
    """

    step: int
    processes: int
    files: dict[str, int]


def clear(folder: Path) -> None:
    """Leaves an empty folder, whatever an earlier attempt has left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def publish(part: Path, checkpoint: Path, step: int, processes: int, settings: str) -> None:
    """Turns a folder with everything in it into a checkpoint, in one rename.

    Args:
        part: Folder in `UNFINISHED`, which every process has finished writing.
        checkpoint: Its name from then on; a damaged checkpoint of that name is replaced.
        step: Optimizer steps done.
        processes: Processes of the run.
        settings: The run's settings as a recipe.
    """
    (part / CONFIG_FILE).write_text(settings, encoding="utf-8")
    files = {
        str(path.relative_to(part)): path.stat().st_size for path in sorted(part.rglob("*")) if path.is_file()
    }
    manifest = Manifest(step, processes, files)
    (part / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    part.rename(checkpoint)
    part.parent.rmdir()


def move_into(part: Path, folder: Path) -> None:
    """Moves what a folder holds into another one on the same disk, each entry at once, weights last."""
    for path in sorted(part.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name)):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    part.rmdir()


def checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run by step; one that was cut off while it was written or deleted does not count."""
    found = [(_NAME.fullmatch(path.name), path) for path in run.glob("checkpoint-*")]
    steps = [(int(match[1]), path) for match, path in found if match and (path / MANIFEST).is_file()]
    return [path for _, path in sorted(steps)]


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run."""
    return next(reversed(checkpoints(run)), None)


def read_manifest(checkpoint: Path) -> Manifest:
    """What a checkpoint says of itself, once each of its files is there in full length.

    Raises:
        QeRLError: It is no checkpoint or a damaged one; the newest one before it that is whole is named.
    """
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise QeRLError(
            f"{checkpoint} is not a complete checkpoint: {MANIFEST} is missing.{_before(checkpoint)}"
        )
    try:
        manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
        damage = next(
            (found for item in manifest.files.items() if (found := _damage(checkpoint, *item))), None
        )
    except (OSError, ValueError, TypeError, AttributeError):
        damage = f"{MANIFEST} cannot be read"
    if damage:
        raise QeRLError(f"The checkpoint {checkpoint} is damaged: {damage}.{_before(checkpoint)}")
    return manifest


def _damage(checkpoint: Path, name: str, size: int) -> str | None:
    path = checkpoint / name
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return None if found == size else f"{name} has {found} bytes instead of {size}"


def _before(checkpoint: Path) -> str:
    """Advice: the newest checkpoint beside a damaged one, and older, that is whole."""
    match = _NAME.fullmatch(checkpoint.name)
    others = checkpoints(checkpoint.parent) if match else []
    for other in reversed(others):
        if int(other.name.rpartition("-")[2]) >= int(match[1]):  # type: ignore[index]
            continue
        try:
            read_manifest(other)
        except QeRLError:
            continue
        return f" Go on with --resume_from_checkpoint {other}"
    return " There is none before it; copy it again or start anew."
