"""Who writes into a run folder: one training at a time, which holds a lock there.

The kernel frees what a process that dies has locked. Only the first process of a training asks for it.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_LOCK_FILE = "_lock"
"""In the run folder, locked while a training writes there; no file of such a name is pushed to the Hub."""


@contextlib.contextmanager
def claimed(folder: Path, process: int) -> Iterator[bool]:
    """A block in which this training has the folder; whether nobody else had it.

    Args:
        folder: The run folder.
        process: Number of this process; all but the first have what that one has, and ask nobody.
    """
    lock, alone = FileLock(folder / _LOCK_FILE), True
    try:
        if process == 0:
            lock.acquire(blocking=False)
    except Timeout:
        alone = False
    except (NotImplementedError, OSError) as error:  # a disk without locks, or nothing may be written there
        logger.warning("%s cannot be locked (%s): see to it that no other run writes there.", folder, error)
    try:
        yield alone
    finally:
        lock.release()
