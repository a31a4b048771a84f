"""The lock of a run folder: one training at a time writes into it.

The kernel releases the lock of a process that dies. Only the first process of a training acquires it.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_LOCK_FILE = "_lock"
"""Lock file in the run folder; files whose names begin with an underscore are not pushed to the Hub."""


@contextlib.contextmanager
def claimed(folder: Path, process: int) -> Iterator[bool]:
    """Hold the lock of a run folder in a block; yield False if another training has it.

    Args:
        folder: The run folder.
        process: Number of this process; only process 0 takes the lock, all others yield True.
    """
    lock, alone = FileLock(folder / _LOCK_FILE), True
    try:
        if process == 0:
            lock.acquire(blocking=False)
    except Timeout:
        alone = False
    except (NotImplementedError, OSError) as error:  # a disk without locks, or nothing may be written there
        logger.warning("%s cannot be locked (%s): make sure that no other run writes there.", folder, error)
    try:
        yield alone
    finally:
        lock.release()
