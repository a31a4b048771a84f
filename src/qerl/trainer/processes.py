"""Joint shutdown of the processes of one run.

A process that fails leaves the others waiting in their next collective: Gloo notices after a while, NCCL
after `ddp_timeout`, half an hour. Exceptions cannot be passed on through collectives, since a process may
fail between any two of them. So there is a second channel, the store of the processes' rendezvous: a failing
process writes a key there, and a thread in each other process polls that key twice a second and ends its
process, wherever it waits. Only the first process to fail reports its error.

Given up: a process that dies without writing the key (SIGKILL, a crash of the driver). The launcher notices
and ends the others.
"""

import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from transformers import TrainingArguments

from qerl.errors import QeRLError

_LOOK = 0.5  # seconds
_PATIENCE = 5.0  # seconds that processes wait for each other at the end

_runs = itertools.count()


@contextlib.contextmanager
def ends_together(args: TrainingArguments) -> Iterator[None]:
    """Return a context manager that all processes of a run leave normally, or none does.

    An exception in one process ends the others with its exit status: 2 for a `QeRLError`, 130 for an
    interruption, else 1. The context does nothing with a single process, or without `MASTER_ADDR`, the
    address of the store.
    """
    if args.world_size == 1 or "MASTER_ADDR" not in os.environ:
        yield
        return
    peers = _Peers(args.process_index, args.world_size)
    try:
        yield
    except BaseException as error:
        peers.fail(error)
        raise
    peers.arrive()


class _Peers:
    """Connection of this process to the other ones, through the store."""

    def __init__(self, rank: int, world: int) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        self._rank, self._world = rank, world
        self._prefix = f"qerl/{next(_runs)}"
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def arrive(self) -> None:
        """Wait until all processes are done; the process group is closed at exit, as torch requires."""
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the store's process has left, so all had arrived
            self._count("arrived")
            while self._counted("arrived") < self._world and not self._failed():
                time.sleep(0.05)
            if failed := self._failed():
                self._follow(failed)
        atexit.unregister(_close_group)
        atexit.register(_close_group)

    def fail(self, error: BaseException) -> None:
        """Report a failure to the other processes; if another one failed first, end this process silently.

        Raises:
            QeRLError: `error` comes from the loss of another process, which has reported nothing.
        """
        self._over.set()
        status = 2 if isinstance(error, QeRLError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        lost = _lost_a_peer(error)
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + 2 * _LOOK
            while lost and not self._failed() and time.monotonic() < deadline:
                time.sleep(0.05)
            mine = f"{self._rank} {2 if lost else status}"
            told = self._store.compare_set(f"{self._prefix}/failed", "", mine).decode()
            if told != mine:
                self._follow(told)
        atexit.register(self._last, 2 if lost else status)
        if lost:
            raise QeRLError(
                "Another process of this run has ended without an error message; look into the launcher's "
                "output and the system's log, and go on with --resume_from_checkpoint true."
            ) from error

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            try:
                failed = self._failed()
            except RuntimeError:
                if not self._over.is_set():
                    print("The process or launcher that holds the run together has ended.", file=sys.stderr)
                    _leave(2)
                return
            if failed and not self._over.is_set():
                self._follow(failed)

    def _follow(self, failed: str) -> None:
        """End this process because another one failed, once that one has reported its error."""
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            while not self._store.check([f"{self._prefix}/said"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            self._count("gone")
        self._linger()
        _leave(int(failed.split()[1]))

    def _last(self, status: int) -> None:
        """End this process, which has reported its error, after the others."""
        for number in (signal.SIGINT, signal.SIGTERM):  # a launcher ends processes that are still running
            signal.signal(number, signal.SIG_IGN)
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/said", "")
            while self._counted("gone") < self._world - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
        self._linger()
        _leave(status)

    def _linger(self) -> None:
        """Wait a moment in the first process, which may hold the store that others still read."""
        if self._rank == 0:
            time.sleep(_LOOK)

    def _failed(self) -> str:
        key = f"{self._prefix}/failed"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _count(self, what: str) -> None:
        self._store.add(f"{self._prefix}/{what}", 1)

    def _counted(self, what: str) -> int:
        return self._store.add(f"{self._prefix}/{what}", 0)


def _lost_a_peer(error: BaseException) -> bool:
    """Return True if an error comes from a collective in which another process was missing."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and "gloo" in str(seen)):
            return True
        seen = seen.__cause__
    return False


def _close_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave(status: int) -> None:
    """End this process at once; torch would first wait for collectives that can no longer complete."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # the progress bar hides the cursor
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
