"""Checkpoint folders: whole, or not there.

A checkpoint is written into a temporary folder and renamed once every process has written its part. So if a
run ends in the middle of saving, each `checkpoint-N` is whole, and no whole one was deleted for one that is
not. Its last file lists all others with their sizes: a file that a copy, a full disk or a power failure has
cut short is found before anything is loaded, and the error names the checkpoint before it. The settings are
in the folder, too, because a resume is checked against them.

Given up: flushing to the disk. A process that is killed loses nothing by that; after a power failure the
sizes tell.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from qerl.errors import QeRLError
from qerl.run_folder import CONFIG_FILE, MANIFEST_FILE, checkpoint_step, checkpoints


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's own list of its contents.

    Attributes:
        step: Optimizer steps done.
        processes: Processes of the run that saved it.
        files: Sizes in bytes by path within the folder.
        device: Device of its first process (`qerl.kernels.device.device_words`); None: not known.
    """

    step: int
    processes: int
    files: dict[str, int]
    device: str | None = None


def clear(folder: Path) -> None:
    """Make an empty folder, without the remains of an earlier attempt."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def publish(
    part: Path, checkpoint: Path, step: int, processes: int, settings: str, device: str | None = None
) -> None:
    """Turn a complete folder into a checkpoint, in one rename.

    Args:
        part: Folder in `UNFINISHED`, which every process has finished writing.
        checkpoint: Its new name; a damaged checkpoint of that name is replaced.
        step: Optimizer steps done.
        processes: Processes of the run.
        settings: The run's settings as a recipe.
        device: Device of this process.
    """
    (part / CONFIG_FILE).write_text(settings, encoding="utf-8")
    files = {
        str(path.relative_to(part)): path.stat().st_size for path in sorted(part.rglob("*")) if path.is_file()
    }
    manifest = Manifest(step, processes, files, device)
    (part / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    part.rename(checkpoint)
    part.parent.rmdir()


def move_into(part: Path, folder: Path) -> None:
    """Move the entries of a folder into another one on the same disk, weights last."""
    for path in sorted(part.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name)):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    part.rmdir()


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, after a check that all its files are there in full length.

    Raises:
        QeRLError: The folder is no checkpoint or a damaged one; the message names the newest whole one before
            it.
    """
    path = checkpoint / MANIFEST_FILE
    if not path.is_file():
        raise QeRLError(
            f"{checkpoint} is not a complete checkpoint: {MANIFEST_FILE} is missing.{_before(checkpoint)}"
        )
    try:
        manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
        damage = next(
            (found for item in manifest.files.items() if (found := _damage(checkpoint, *item))), None
        )
    except (OSError, ValueError, TypeError, AttributeError):
        damage = f"{MANIFEST_FILE} cannot be read"
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
    """Return advice that names the newest whole checkpoint before a damaged one."""
    step = checkpoint_step(checkpoint)
    others = checkpoints(checkpoint.parent) if step is not None else []
    for other in reversed(others):
        if (checkpoint_step(other) or 0) >= (step or 0):
            continue
        try:
            read_manifest(other)
        except QeRLError:
            continue
        return f" Go on with --resume_from_checkpoint {other}"
    return " No complete checkpoint precedes it; copy it again or start anew."
