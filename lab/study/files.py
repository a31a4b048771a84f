"""The lock of a folder that several processes share: who computes what."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def claimed(lock_file: Path) -> Iterator[bool]:
    """A block in which no other process holds this lock; false where another one does already.

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
