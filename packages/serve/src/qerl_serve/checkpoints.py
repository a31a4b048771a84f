"""Saved adapters in the server's folder, under the tinker:// paths by which clients name them.

    ROOT/MODEL_ID/weights/NAME/             by `save_state`: adapter and optimizer
    ROOT/MODEL_ID/sampler_weights/NAME/     by `save_for_sampler`: the adapter alone
    ROOT/MODEL_ID/external_weights/NAME/    by `save_external`: the same, for other programs

Each is a plain PEFT folder, which PEFT, vLLM and `qerl eval` read, with the optimizer's moments, the seed and
the step count beside it, so that training resumes bit for bit. The folder also holds the client's notes and,
in a separate file because it may change, the time of expiry. Gradients since the last optimizer step are not
saved.

A folder is written aside and renamed, as the checkpoints of a run are. A former folder of the same name is
first moved aside, and moved back by the next server if this one is killed in between: so either the former or
the new one is always there. ROOT belongs to one server at a time, which holds a lock on it until it ends or
is killed.

A path consists of an id and a name that `qerl_serve.names` accepts, without characters that mean something to
a file system, so no path leads out of ROOT; a path through a symbolic link is refused.
"""

import contextlib
import errno
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from qerl.atomic import write_whole
from qerl.checkpoint_folder import clear, publish, read_manifest
from qerl.errors import QeRLError
from qerl.run_folder import ADAPTER_FILE, MANIFEST_FILE, POLICY_FILE, UNFINISHED, read_json
from qerl_serve.adapters import TrainedAdapter
from qerl_serve.names import KINDS, SCHEME, split_path
from qerl_serve.seats import Shape
from qerl_serve.types import Checkpoint, Notes, NotSavedError

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
EXPIRY_FILE = ".expires.json"
"""Hidden, so that it is not downloaded: copied to another server's folder, it would get the weights deleted
there."""
OPTIMIZER_FILE = "optimizer.safetensors"
LOCK_FILE = "server.lock"
REPLACED = ".replaced"
"""Holds folders that are being replaced, by their paths."""

TRAINING, SAMPLING, EXTERNAL = KINDS


@dataclass(frozen=True)
class Saved:
    """A saved adapter, as read from its folder.

    Attributes:
        shape, seed, steps: As in `TrainedAdapter`.
        fingerprint, base: Fingerprint and name of its base.
        weights: Its matrices; empty if they were not read.
        moments: The optimizer's moments; empty if not saved or not requested.
    """

    shape: Shape
    seed: int
    steps: int
    base: str
    fingerprint: str | None
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    moments: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Store:
    """A server's folder of saved weights.

    Args:
        root: The folder, created if it is missing.
        facts: Content of policy.json for every saved adapter, including "base" and "fingerprint".
        settings: Content of config.yaml, from which `qerl eval` loads the base in the weight format of the
            training.

    Raises:
        QeRLError: Another server uses this folder.
    """

    def __init__(self, root: Path, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.root = root.absolute()
        self._facts, self._settings = dict(facts), dict(settings)
        self.root.mkdir(parents=True, exist_ok=True)
        # The thread that loads the model takes the lock; the worker, another thread, releases it.
        self._lock = FileLock(self.root / LOCK_FILE, thread_local=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise QeRLError(
                f"Another server uses the folder {self.root}; end that one, or give this one a folder of its "
                "own with --output_dir."
            ) from None
        shutil.rmtree(self.root / UNFINISHED, ignore_errors=True)
        self._put_back()

    def save(
        self,
        model_id: str,
        kind: str,
        name: str,
        adapter: TrainedAdapter,
        config: LoraConfig,
        notes: Notes,
        overwrite: bool = False,
    ) -> str:
        """Save an adapter and return its path; a damaged one of the same name is replaced.

        Args:
            model_id: Id of its model.
            kind: `TRAINING`, with the optimizer, `SAMPLING` or `EXTERNAL`.
            name: The client's name for it.
            adapter: The adapter.
            config: Its config for PEFT.
            notes: The client's notes.
            overwrite: True if it may replace saved weights of this name.

        Raises:
            QeRLError: The name cannot be part of a path, is taken, or the disk is full.
        """
        path = f"{SCHEME}{model_id}/{kind}/{name}"
        folder = self.folder(path)
        if not overwrite and _is_whole(folder):
            replace = ", or replace it with save_state(..., overwrite=True)" if kind == TRAINING else ""
            raise QeRLError(f"{path} is saved already; choose another name, delete it first{replace}.")
        try:
            part = self._written(adapter, config, notes, with_optimizer=kind == TRAINING)
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                if (folder / MANIFEST_FILE).is_file():
                    aside = self.root / REPLACED / folder.relative_to(self.root)
                    clear(aside.parent)
                    folder.rename(aside)
                publish(part, folder, adapter.steps, 1, json.dumps(self._settings, indent=1) + "\n")
            finally:
                self._put_back()
            if notes.expires is not None:
                _write_expiry(folder, notes.expires)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self.root / UNFINISHED, ignore_errors=True)  # which may be what fills the disk
            if not _is_full(error):
                raise
            raise QeRLError(
                f"{path} was not saved, because the server's disk is full; delete checkpoints that are no "
                "longer needed and save again. Earlier checkpoints are still there, and training can go on."
            ) from error
        return path

    def read(self, path: str, with_optimizer: bool = False) -> Saved:
        """Read a saved adapter into the host's memory.

        Raises:
            QeRLError: Nothing is saved at this path, it is damaged, or it was saved without the requested
                optimizer.
        """
        folder, about = self._about(path)
        if with_optimizer and not (folder / OPTIMIZER_FILE).is_file():
            raise QeRLError(
                f"{path} was saved to sample from, without an optimizer; load it without one, or load what "
                "save_state wrote."
            )
        try:
            weights = load_file(folder / ADAPTER_FILE)
            moments = load_file(folder / OPTIMIZER_FILE) if with_optimizer else {}
        except (SafetensorError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise QeRLError(f"{path} is damaged ({why}); load another checkpoint.") from error
        return Saved(**vars(about) | {"weights": weights, "moments": moments})

    def about(self, path: str) -> Saved:
        """Return the saved adapter at a path, without its tensors.

        Raises:
            QeRLError: Nothing is saved at this path, or it is damaged.
        """
        return self._about(path)[1]

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the entry of a path in a list of checkpoints.

        Raises:
            QeRLError: Nothing is saved at this path, or it is damaged.
        """
        return _described(path, self._about(path)[0])

    def saved_at(self, path: str) -> int:
        """Return the time of the last save at a path, in nanoseconds, which tells versions apart.

        Raises:
            QeRLError: Nothing is saved at this path, or it is damaged.
        """
        return (self._about(path)[0] / MANIFEST_FILE).stat().st_mtime_ns

    def list(self) -> list[Checkpoint]:
        """Return all saved weights, oldest first, damaged ones included; those are also logged."""
        found = []
        for path, folder in self._all():
            try:
                read_manifest(folder)
            except QeRLError as error:
                logger.warning("Clients can delete %s, and save another under its name: %s", path, error)
            with contextlib.suppress(FileNotFoundError):  # it has just been deleted by hand
                found.append(_described(path, folder))
        return sorted(found, key=lambda checkpoint: (checkpoint.time, checkpoint.path))

    def delete(self, path: str) -> None:
        """Delete the saved weights at a path, damaged or not.

        Raises:
            QeRLError: Nothing is saved at this path.
        """
        folder = self._there(path)
        (folder / MANIFEST_FILE).unlink()  # first, so that a half-deleted folder does not count as saved
        shutil.rmtree(folder)

    def expire(self, path: str, at: float | None) -> None:
        """Set the time after which the saved weights at a path may be deleted, as in `Notes`.

        Raises:
            QeRLError: Nothing is saved at this path.
        """
        _write_expiry(self._there(path), at)

    def delete_expired(self) -> None:
        """Delete expired weights."""
        for path, folder in list(self._all()):
            expires = _read_expiry(folder)
            if expires is not None and expires <= time.time():
                logger.info("%s has expired and is deleted.", path)
                self.delete(path)

    def close(self) -> None:
        """Release the folder for another server."""
        self._lock.release()

    def folder(self, path: str) -> Path:
        """Return the folder of a path, which need not exist.

        Raises:
            QeRLError: The path is not one of saved weights, or leads through a symbolic link.
        """
        parts = split_path(path)
        folder = self.root.joinpath(*parts)
        if folder.resolve() != self.root.resolve().joinpath(*parts):
            raise QeRLError(f"{path} leads out of the server's folder; nothing is read or written there.")
        return folder

    def _written(
        self, adapter: TrainedAdapter, config: LoraConfig, notes: Notes, with_optimizer: bool
    ) -> Path:
        """Write an adapter's files to a temporary folder and return it."""
        part = self.root / UNFINISHED / "part"
        clear(part)
        config.save_pretrained(str(part))
        _write(adapter.matrices, part / ADAPTER_FILE)
        if with_optimizer:
            _write(adapter.moments(), part / OPTIMIZER_FILE)
        shape = adapter.shape
        state = {
            "rank": shape.rank,
            "attn": shape.attn,
            "mlp": shape.mlp,
            "seed": adapter.seed,
            "steps": adapter.steps,
            "run_notes": dict(notes.run),
            "notes": dict(notes.own),
            "owner": notes.owner,
        }
        (part / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        (part / POLICY_FILE).write_text(json.dumps(self._facts, indent=2) + "\n", encoding="utf-8")
        return part

    def _put_back(self) -> None:
        """Finish replacements: delete a folder that was moved aside if the new one is there, else move it
        back."""
        replaced = self.root / REPLACED
        for aside in replaced.glob(f"*/*/*/{MANIFEST_FILE}"):
            folder = self.root / aside.parent.relative_to(replaced)
            if (folder / MANIFEST_FILE).is_file():
                aside.unlink()  # first, so that half a folder never comes back
            else:
                shutil.rmtree(folder, ignore_errors=True)
                aside.parent.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _all(self) -> Iterator[tuple[str, Path]]:
        """Yield path and folder of all saved weights; folders without a valid path are logged and left
        out."""
        for kind in KINDS:
            for manifest in self.root.glob(f"*/{kind}/*/{MANIFEST_FILE}"):
                path = f"{SCHEME}{manifest.parent.relative_to(self.root)}"
                try:
                    yield path, self.folder(path)
                except QeRLError as error:
                    logger.warning("%s is left out of the list of checkpoints: %s", manifest.parent, error)

    def _there(self, path: str) -> Path:
        """Return the folder of a path, if it holds saved weights; raise `NotSavedError` if not."""
        folder = self.folder(path)
        if not (folder / MANIFEST_FILE).is_file():
            raise NotSavedError(
                f"Nothing is saved at {path} on this server; look at the list of checkpoints."
            )
        return folder

    def _about(self, path: str) -> tuple[Path, Saved]:
        folder = self._there(path)
        try:
            read_manifest(folder)
            state, facts = read_json(folder / STATE_FILE), read_json(folder / POLICY_FILE)
        except QeRLError as error:
            logger.warning("%s is damaged: %s", path, error)
            raise QeRLError(  # without the folders of the server, which do not concern clients
                f"{path} is damaged: files of it are missing or cut short. Load another checkpoint; this one "
                "can be deleted, or replaced by saving under its name."
            ) from error
        try:
            shape = Shape(int(state["rank"]), bool(state["attn"]), bool(state["mlp"]))
            saved = Saved(
                shape, int(state["seed"]), int(state["steps"]), str(facts["base"]), facts["fingerprint"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise QeRLError(
                f"{path} was not saved by this server ({STATE_FILE} or {POLICY_FILE} lacks {error}); load "
                "another checkpoint."
            ) from error
        return folder, saved


def _is_whole(folder: Path) -> bool:
    """True if a folder holds saved weights with all of their files."""
    try:
        read_manifest(folder)
    except QeRLError:
        return False
    return True


def _is_full(error: Exception) -> bool:
    """Return True if an error means that the disk, or the user's quota of it, is full; safetensors says so
    only in its message."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"(os error {number})" in str(error) for number in _FULL)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _described(path: str, folder: Path) -> Checkpoint:
    """Return the entry of a folder in a list of checkpoints."""
    try:
        state = read_json(folder / STATE_FILE)
    except QeRLError:  # it is damaged
        state = {}
    owner = str(state.get("owner") or "")
    notes = Notes(state.get("run_notes") or {}, state.get("notes") or {}, _read_expiry(folder), owner)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Checkpoint(path, folder, size, (folder / MANIFEST_FILE).stat().st_mtime, notes)


def _write_expiry(folder: Path, at: float | None) -> None:
    file = folder / EXPIRY_FILE
    if at is None:
        file.unlink(missing_ok=True)
        return
    write_whole(file, json.dumps({"at": at}))


def _read_expiry(folder: Path) -> float | None:
    """Return the time after which the weights in a folder may be deleted; None if it is not set or cannot be
    read."""
    try:
        at = read_json(folder / EXPIRY_FILE).get("at")
    except QeRLError:
        return None
    return float(at) if isinstance(at, int | float) else None


def _write(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, file, {"format": "pt"})
