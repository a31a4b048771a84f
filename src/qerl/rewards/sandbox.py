"""A sandbox for programs that a model wrote: they run inside bubblewrap, or not at all.

A program gets a Python with the standard library, its input, and a folder ``/tmp`` in memory. It has no
network, no file of this machine but the system's libraries (read-only), no environment variable, and sees no
process but its own. Limits are set from the inside before its first line runs: address space, processor time
and number of processes by the kernel's resource limits, output and files by the limit of a file's length,
because output goes to a file in memory and not to a pipe, which would have to be emptied. System calls that
would get around them are refused (:mod:`qerl.rewards.seccomp`). When the program ends, or its time is up, all
that it started is killed with its process namespace.

If this process is root, the program runs under a user id that no other program has at that time, because the
kernel limits processes per user, and not for root. Otherwise it runs in a user namespace of its own.

Given up:

* Memory is limited per process of a program, not in total, and the kernel's memory for a process is not part
  of its address space: buffers of sockets (about 15 MB per TCP connection within the sandbox; a process has
  descriptors for at most 15), and names of files, which a process can create at about 100 MB per second.
  :attr:`Limits.most_mb` is the worst case of all but the names. A control group around the whole training
  process bounds those too.
* Processor time is limited per process, too: in the worst case it is ``seconds`` times ``processes``.
* The kernel is the security boundary. Programs that attack the kernel itself need a virtual machine around
  all of this.
* A check runs in the process of the program (:func:`run_python`). A program that searches that process for
  the token of the check can claim to have passed; comparing output cannot be cheated in this way.
"""

import contextlib
import errno
import functools
import json
import math
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qerl.errors import QeRLError
from qerl.rewards.seccomp import seccomp_filter

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"
"""How to get bubblewrap."""

_INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
_STARTED = b"started "
_FILTER = seccomp_filter()
# User ids that systemd gives to services while they run; no files belong to them.
_FREE_UIDS = range(61184, 65520)
_DESCRIPTORS = 32
_SOCKETS_MB = _DESCRIPTORS / 2 * 15  # of a process, all of its descriptors being ends of TCP connections
_SHARE_OF_FILES = 5  # files in /tmp take at most this part of `memory_mb`


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: Wall time, and processor time of each process.
        memory_mb: Address space of each process in MiB; Python itself needs about 30.
        processes: Maximum number of processes and threads at the same time, including the program.
        output_kb: Maximum length of each output and of each file in KiB.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    processes: int = 4
    output_kb: int = 256

    def __post_init__(self) -> None:
        least = {"seconds": 0.1, "memory_mb": 64, "processes": 1, "output_kb": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int | float) or not value <= given < math.inf:
                raise QeRLError(f"{name} of a program is {given!r}; it must be a number, at least {value}.")

    @property
    def most_mb(self) -> float:
        """Memory in MiB that a program takes in the worst case: of its processes, their sockets and files."""
        return self.processes * (self.memory_mb + _SOCKETS_MB) + self.memory_mb / _SHARE_OF_FILES


@dataclass(frozen=True)
class Ran:
    """The result of a program's run.

    Attributes:
        stdout, stderr: Its outputs, cut at the limit.
        exit_code: 0 on success, 128 plus the signal if a signal ended it; None if it timed out.
        checked: True if there was a check and it ran to its end.
        ended: ``exit`` if it ended by itself, else the limit that it reached.
        seconds: Wall time, the sandbox's own start included.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    checked: bool
    ended: Literal["exit", "time", "output"]
    seconds: float


_DEFAULTS = Limits()


def run_python(code: str, stdin: str = "", limits: Limits = _DEFAULTS, check: str = "") -> Ran:
    """Run a program in the sandbox and return its result; block for little more than the time limit.

    Args:
        code: The program.
        stdin: Its whole input.
        limits: Limits of the program.
        check: Statements that run after the program with its names, such as an assert.

    Raises:
        QeRLError: This machine has no sandbox.
    """
    reason = obstacle()
    if reason is not None:
        raise QeRLError(reason)
    return _run(code, stdin, limits, check)


@functools.cache
def obstacle() -> str | None:
    """Return why programs cannot run on this machine, a sentence with a remedy; None if they can."""
    if shutil.which("bwrap") is None:
        return (
            "A program that a model wrote runs only inside bubblewrap, which is not installed here; get it "
            f"with {INSTALL}."
        )
    if _FILTER is None:
        return f"Programs that a model wrote do not run on {platform.machine()}, only on x86_64 and aarch64."
    try:
        ran = _run("print(1)", "", Limits(seconds=30), "")
    except QeRLError as error:
        return str(error)
    if ran.stdout != "1\n":
        return f"Programs do not run in bubblewrap's sandbox on this machine ({_last_line(ran.stderr)})."
    return None


def _run(code: str, stdin: str, limits: Limits, check: str) -> Ran:
    if os.geteuid() != 0:
        return _run_as(None, code, stdin, limits, check)
    with _free_uid() as uid:
        return _run_as(uid, code, stdin, limits, check)


@contextlib.contextmanager
def _free_uid() -> Iterator[int]:
    """Claim a user id that no other program in a sandbox of this network namespace has.

    The claim is the name of an abstract socket, which belongs to one process and is free again when the
    process ends.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        first = secrets.randbelow(len(_FREE_UIDS))
        for uid in (*_FREE_UIDS[first:], *_FREE_UIDS[:first]):
            try:
                claim.bind(f"\0qerl-sandbox-{uid}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        else:
            raise QeRLError(f"{len(_FREE_UIDS)} programs run in sandboxes here; let some end first.")
        yield uid


def _run_as(uid: int | None, code: str, stdin: str, limits: Limits, check: str) -> Ran:
    token = secrets.token_hex(16)
    job = {"program": code, "check": check, "token": token, "uid": uid, "limits": _resource_limits(limits)}
    texts = (stdin.encode("utf-8", "surrogatepass"), b"", b"", json.dumps(job).encode(), b"", _FILTER or b"")
    files = [_memory_file(text) for text in texts]
    try:
        source, out, error, job_fd, report_fd, filter_fd = files
        sandbox = _bubblewrap(uid is not None, limits, filter_fd)
        command = [*sandbox, *_PYTHON, _INSIDE, str(job_fd), str(report_fd)]
        started = time.monotonic()
        code_of_exit = _wait(command, (source, out, error), (job_fd, report_fd, filter_fd), limits.seconds)
        seconds = time.monotonic() - started
        maximum = limits.output_kb * 1024
        printed, complained, report = (os.pread(file, maximum, 0) for file in (out, error, report_fd))
    finally:
        for file in files:
            os.close(file)
    if not report.startswith(_STARTED) and code_of_exit is not None:
        raise QeRLError(
            f"bubblewrap cannot make a sandbox here ({_last_line(_text(complained))}); allow user "
            "namespaces for this user (sysctl user.max_user_namespaces, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0), or run outside of a container, where they are "
            "allowed."
        )
    ended: Literal["exit", "time", "output"] = "exit"
    if code_of_exit is None:
        ended = "time"
    elif maximum in (len(printed), len(complained)):
        ended = "output"
    checked = report == _STARTED + token.encode()
    return Ran(_text(printed), _text(complained), code_of_exit, checked, ended, seconds)


def _wait(
    command: list[str], standard: tuple[int, int, int], more: tuple[int, ...], seconds: float
) -> int | None:
    """Run the command and return its exit code, or None if it timed out and was killed."""
    stdin, stdout, stderr = standard
    with subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=more, env={}, start_new_session=True
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()  # everything in the sandbox ends with bubblewrap


_PYTHON = [str(Path(sys.executable).resolve()), "-I", "-S", "-B", "-X", "utf8", "-c"]
"""The interpreter of this process, without site-packages, environment variables and files of the user."""


def _bubblewrap(root: bool, limits: Limits, filter_fd: int) -> list[str]:
    """Return the command of bubblewrap, up to that of the program."""
    devices = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
    rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        shutil.which("bwrap") or "bwrap",
        "--die-with-parent", "--new-session",
        *(rights if root else ["--unshare-user"]),
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        *_system_folders(),
        "--perms", "1777", "--size", str(limits.memory_mb * 2**20 // _SHARE_OF_FILES), "--tmpfs", "/tmp",
        *(word for name in devices for word in ("--dev-bind", name, name)),
        "--remount-ro", "/",
        "--chdir", "/tmp",
        "--seccomp", str(filter_fd),
        "--",
    ]  # fmt: skip


@functools.cache
def _system_folders() -> tuple[str, ...]:
    """Return the read-only binds that a Python needs to start: the system's libraries and its own."""
    words: list[str] = []
    for name in ("/usr", "/lib", "/lib64", "/bin", "/nix/store", "/etc/ld.so.cache"):
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            words += ["--ro-bind", name, name]
    # An interpreter of the user's own: its folder holds more than the interpreter (packages, environments).
    own = [Path(_PYTHON[0]).parent, Path(sysconfig.get_path("stdlib")).parent]
    for path in dict.fromkeys(path.resolve() for path in own):
        if not path.is_relative_to("/usr"):
            # bubblewrap would make the folders above it for itself alone, and the program is another user.
            for parent in reversed(path.parents[:-1]):
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--ro-bind", str(path), str(path)]
    return tuple(words)


def _resource_limits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": int(limits.memory_mb * 2**20),
        "RLIMIT_CPU": math.ceil(limits.seconds),
        "RLIMIT_FSIZE": int(limits.output_kb * 1024),
        "RLIMIT_NPROC": int(limits.processes),
        "RLIMIT_NOFILE": _DESCRIPTORS,
        "RLIMIT_CORE": 0,
    }


def _memory_file(content: bytes) -> int:
    """Return a descriptor of a file in memory with this content, positioned at its start."""
    file = os.memfd_create("qerl-sandbox")
    data = memoryview(content)
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]
