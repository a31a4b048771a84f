"""Lock files by which processes that share a folder claim work."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def claimed(lock_file: Path) -> Iterator[bool]:
    """Hold a lock for the block; yields False if another process already holds it.

    The kernel releases the lock of a process that dies.
    """
    lock = FileLock(lock_file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
