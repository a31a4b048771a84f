"""Runs of `qerl train` as forks of this process, which has imported everything once.

A process takes seconds to import torch, and a tiny run takes less. So many runs are forked from one process
that has trained nothing: it must have no threads, and no state of accelerate.
"""

import atexit
import faulthandler
import itertools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import qerl.cli
import qerl.trainer.run

_LAUNCHER = 10.0  # seconds after which a launcher ends what a process left behind
_ports = itertools.count()


class Forks:
    """One run of the command on one or more processes.

    Args:
        words: Arguments of `qerl`.
        processes: How many, found over the environment as a launcher leaves it.
        log: Folder for what each process writes, ``rank-R.log``.
        limit: Seconds after which a process writes where it stands, and counts as hanging.
        prepare: Called in each process with its rank before the command begins.
    """

    def __init__(
        self,
        words: list[str],
        processes: int,
        log: Path,
        limit: float,
        prepare: Callable[[int], None] = lambda rank: None,
    ) -> None:
        log.mkdir(parents=True, exist_ok=True)
        self.logs = [log / f"rank-{rank}.log" for rank in range(processes)]
        self._deadline = time.monotonic() + limit
        self.hung = False
        environment = _environment(processes)
        sys.stdout.flush()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._orphaned: float | None = None
        for rank in range(processes):
            pid = os.fork()
            if pid == 0:
                _become(words, environment | _rank(rank, processes), self.logs[rank], limit, prepare, rank)
            self._pids[rank] = pid

    def signal(self, number: int, ranks: list[int]) -> None:
        """Sends a signal to those of these processes that are still there."""
        for rank in ranks:
            if rank not in self._codes:
                os.kill(self._pids[rank], number)

    def poll(self) -> bool:
        """Whether all processes have ended; one beyond the limit is killed."""
        for rank, pid in self._pids.items():
            if rank not in self._codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._codes[rank] = os.waitstatus_to_exitcode(status)
        done = len(self._codes) == len(self._pids)
        if not done and {-signal.SIGTERM, -signal.SIGINT} & set(self._codes.values()):
            # It ended before it could tell the others, who wait for it to join: a launcher ends them.
            self._orphaned = self._orphaned or time.monotonic()
            if time.monotonic() > self._orphaned + _LAUNCHER:
                self.signal(signal.SIGTERM, list(self._pids))
        if not done and time.monotonic() > self._deadline:
            self.hung = True
            self.signal(signal.SIGKILL, list(self._pids))
        return done

    def wait(self) -> list[int]:
        """Exit codes by rank; a negative one is the signal that ended the process."""
        while not self.poll():
            time.sleep(0.02)
        return [self._codes[rank] for rank in sorted(self._codes)]

    @property
    def text(self) -> str:
        """What all processes wrote."""
        return "".join(path.read_text(errors="replace") for path in self.logs)


def _environment(processes: int) -> dict[str, str]:
    if processes == 1:
        return {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": str(processes)}


def _port() -> int:
    """A free port that no run beside this one takes: below those that the system gives out by itself."""
    while True:
        port = 10000 + (os.getpid() * 37 + next(_ports)) % 20000
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def _rank(rank: int, processes: int) -> dict[str, str]:
    return {} if processes == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _become(
    words: list[str],
    environment: dict[str, str],
    log: Path,
    limit: float,
    prepare: Callable[[int], None],
    rank: int,
) -> None:
    """What a process started with these arguments does, from here to its end."""
    status = 1
    try:
        atexit._clear()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(environment)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.dump_traceback_later(max(1.0, limit - 5), file=sys.stderr)
        qerl.cli.console = Console(quiet=rank != 0, file=sys.stdout)
        prepare(rank)
        status = qerl.cli.main(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
