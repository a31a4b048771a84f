"""Files and folders that appear as a whole or not at all, and errors of the disk as one sentence.

They are written under a temporary name, then renamed. Given up: flushing to the disk. A process that is
killed loses nothing by that; a power failure may.
"""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl.errors import QeRLError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file or replace it; a reader finds the old content or the new one.

    Args:
        path: The file; its folder exists.
        content: Text (as UTF-8) or bytes.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def writing(what: str, advice: str = "choose another --out") -> Iterator[None]:
    """Turn an error of the disk in the block into one sentence.

    Args:
        what: The beginning of the sentence: which file cannot be written, and where.
        advice: The end of the sentence.

    Raises:
        QeRLError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise QeRLError(f"{what}: {error.strerror or error}; {advice}.") from error


@contextmanager
def new_folder(target: Path, locked: bool = False) -> Iterator[Path]:
    """A folder that appears under its name complete or not at all.

    Yields a hidden sibling to write into, which is renamed to ``target`` at the end. If the body fails, or is
    ended by Ctrl-C or SIGTERM, the sibling is deleted. Only SIGKILL or a power cut leave it behind.

    Args:
        target: Does not exist.
        locked: True if no other process can be writing it, so that an old sibling is deleted.

    Raises:
        FileExistsError: The sibling exists: ``target`` is being written, or was when a process was killed.
        OSError: The folder cannot be made.
    """
    partial = target.with_name(f".{target.name}.partial")
    if locked:
        shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        with _sigterm_as_exit():
            yield partial
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM, which would end Python at once, into SystemExit, which runs ``finally`` blocks."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def leave(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
