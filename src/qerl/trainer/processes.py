"""Several processes of one run end together.

A process that fails leaves the others waiting in their next collective: Gloo notices after a while, NCCL
after `ddp_timeout`, half an hour. Exceptions cannot be passed on through collectives, since a process may
fail between any two of them. So there is a second channel, the store through which the processes found each
other: one that fails leaves a word there, and a thread in each of the others looks for it twice a second and
ends its process, wherever that waits. Only the first to fail speaks.

Given up: one that dies without a word (SIGKILL, a crash of the driver). The launcher sees that and ends the
others.
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
_PATIENCE = 5.0  # seconds that processes wait for each other's last words

_runs = itertools.count()


@contextlib.contextmanager
def ends_together(args: TrainingArguments) -> Iterator[None]:
    """A context that either all processes of a run leave, or none.

    An exception in one ends the others with its exit status: 2 for a `QeRLError`, 130 for an interruption,
    else 1. It does nothing where there is one process, or no store to be found by its address.
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
    """The other processes, as seen from this one."""

    def __init__(self, rank: int, world: int) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        self._rank, self._world = rank, world
        self._prefix = f"qerl/{next(_runs)}"
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def arrive(self) -> None:
        """Return when all processes are done; later the process group is closed as torch asks for."""
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the process with the store has left, so all had arrived
            self._count("arrived")
            while self._counted("arrived") < self._world and not self._failed():
                time.sleep(0.05)
            if failed := self._failed():
                self._follow(failed)
        atexit.unregister(_close_group)
        atexit.register(_close_group)

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless another one failed first: then this process ends without a word.

        Raises:
            QeRLError: `error` is that another process has gone, which has said nothing.
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
                "Another process of this run has ended without a word; see what its launcher or the system "
                "says of it, and go on with --resume_from_checkpoint true."
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
        """End this process after another one, once that has said why."""
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            while not self._store.check([f"{self._prefix}/said"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            self._count("gone")
        self._linger()
        _leave(int(failed.split()[1]))

    def _last(self, status: int) -> None:
        """End this process, which has said why it failed, after the others."""
        for number in (signal.SIGINT, signal.SIGTERM):  # a launcher ends what it finds
            signal.signal(number, signal.SIG_IGN)
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/said", "")
            while self._counted("gone") < self._world - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
        self._linger()
        _leave(status)

    def _linger(self) -> None:
        """Wait a moment on the first process, which may hold the store that others still read."""
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
    """True if an error comes from a collective in which another process was missing."""
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
    """End this process at once; torch would first wait for collectives that nobody takes part in."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # the progress bar hides the cursor
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
