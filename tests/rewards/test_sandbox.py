"""What a program in the sandbox may do, and what it tries in vain."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qerl.errors import QeRLError
from qerl.rewards import sandbox
from qerl.rewards.sandbox import Limits, run_python
from tests.support.sandbox import REQUIRED, needs_sandbox, skips

pytestmark = pytest.mark.slow

LIMITS = Limits(seconds=1.5, memory_mb=128, processes=6, output_kb=16)


@needs_sandbox
def test_a_program_reads_its_input_and_prints():
    ran = run_python("import math, socket\nprint(int(input()) * 2, '€')", "21\n")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended) == ("42 €\n", "", 0, "exit")


@needs_sandbox
def test_what_a_program_raises_is_in_its_error_output():
    ran = run_python("1 / 0")
    assert ran.exit_code == 1
    assert ran.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("def double(x):\n    return 2 * x", True),
        ("def double(x):\n    return x", False),
        ("def double(x):\n    raise SystemExit(0)", False),
        ("import os\nos._exit(0)", False),
        ("import sys\nsys.exit()", False),
        ("def double(", False),
    ],
)
def test_a_check_passes_only_if_it_runs_to_its_end(program, passes):
    assert run_python(program, limits=LIMITS, check="assert double(2) == 4").checked is passes


@needs_sandbox
def test_a_program_sees_no_file_no_variable_and_no_process_of_this_machine(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    monkeypatch.setenv("API_KEY", "secret")
    program = f"""
import os
for path in ({str(secret)!r}, {str(Path.home() / ".bashrc")!r}, "/etc/passwd", "/proc/1/environ"):
    try:
        print(open(path).read())
    except OSError as error:
        print(type(error).__name__)
print(sorted(os.environ), os.getpid() < 10, os.getuid() != 0)
"""
    ran = run_python(program, limits=LIMITS)
    lines = ran.stdout.splitlines()
    assert set(lines[:-1]) <= {"FileNotFoundError", "PermissionError"}
    assert len(lines) == 5
    assert lines[-1] == "['LC_CTYPE', 'PWD'] True True"


@needs_sandbox
def test_a_program_writes_to_its_own_folder_alone():
    program = f"""
import os
for folder in ("/", "/usr", "/dev", "/etc", {str(Path(os.__file__).parent)!r}, "/tmp"):
    try:
        open(folder + "/mark", "w").close()
        print("wrote to", folder)
    except OSError:
        pass
"""
    assert run_python(program, limits=LIMITS).stdout == "wrote to /tmp\n"
    assert run_python("import os\nprint(os.listdir('/tmp'))", limits=LIMITS).stdout == "[]\n", "nothing stays"


@needs_sandbox
def test_a_program_has_no_network():
    program = """
import socket
for address in (("127.0.0.1", PORT), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=1)
        print("connected")
    except OSError:
        print("refused")
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = run_python(program.replace("PORT", str(server.getsockname()[1])), limits=LIMITS)
    assert ran.stdout == "refused\nrefused\n"


@needs_sandbox
def test_a_fork_bomb_is_bounded_and_killed():
    program = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    ran = run_python(named("bomb") + program, limits=Limits(seconds=0.5, processes=6))
    assert ran.ended == "time"
    assert soon(lambda: "bomb" not in names())
    counting = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(9)
        children += 1
except OSError:
    print(children)
"""
    assert int(run_python(counting, limits=LIMITS).stdout) < LIMITS.processes


@needs_sandbox
def test_a_program_does_not_get_more_memory_than_its_limit():
    ran = run_python("x = bytearray(2**30)", limits=LIMITS)
    assert ran.stderr.rstrip().endswith("MemoryError")
    files = "import os\nfor i in range(10**6):\n    open(f'/tmp/{i}', 'wb').write(bytes(16000))"
    assert "No space left" in run_python(files, limits=LIMITS).stderr


@needs_sandbox
@pytest.mark.parametrize(
    "call",
    [
        "libc.shmget(0, 2**20, 0o1600)",
        "libc.memfd_create(b'x', 0)",
        "libc.unshare(0x10000000)",
        "libc.ptrace(0)",
        "libc.inotify_init1(0)",
        "libc.mq_open(b'/x', os.O_CREAT | os.O_RDWR, 0o600, None)",
        "libc.vmsplice(os.pipe()[1], ctypes.create_string_buffer(bytes(16)), 0, 0)",
        "libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0)",
        "libc.process_vm_writev(os.getpid(), None, 0, None, 0, 0)",
        "libc.fcntl(os.pipe()[1], 1031, 2**20)",  # F_SETPIPE_SZ
    ],
)
def test_calls_that_get_around_the_limits_are_refused(call):
    program = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({call} < 0)\n"
    ran = run_python(program + "print(os.strerror(ctypes.get_errno()))", limits=LIMITS)
    assert ran.stdout == "True\nOperation not permitted\n"


@needs_sandbox
def test_calls_that_are_newer_than_the_filter_fail_as_on_an_older_kernel():
    later = {"open_tree": 428, "fsopen": 430, "pidfd_open": 434, "pidfd_getfd": 438, "memfd_secret": 447}
    program = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for number in (*{list(later.values())}, 999):
    print(libc.syscall(number, 0, 0, 0), os.strerror(ctypes.get_errno()))
"""
    assert run_python(program, limits=LIMITS).stdout == "-1 Function not implemented\n" * (len(later) + 1)


@needs_sandbox
def test_sockets_are_of_the_sandbox_alone():
    program = """
import socket
for family, kind in (("VSOCK", "STREAM"), ("NETLINK", "RAW"), ("PACKET", "RAW"), ("ALG", "SEQPACKET")):
    try:
        socket.socket(getattr(socket, "AF_" + family), getattr(socket, "SOCK_" + kind))
        print("there is", family)
    except OSError as error:
        assert error.errno == 97, error
with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname()) as client:
        client.send(b"within")
    print(server.accept()[0].recv(9), socket.socketpair()[0].family.name)
"""
    ran = run_python(program, limits=LIMITS)
    assert (ran.stdout, ran.stderr) == ("b'within' AF_UNIX\n", "")


@needs_sandbox
@pytest.mark.parametrize("option", [7, 8, 32, 33])
def test_buffers_of_sockets_do_not_grow_beyond_the_limit_of_memory(option):
    program = f"""
import socket
kept, sent = [], 0
try:
    while True:
        kept += socket.socketpair()
        for end in kept[-2:]:
            try:
                end.setsockopt(socket.SOL_SOCKET, {option}, 2**26)
                print("a larger buffer")
            except PermissionError:
                pass
            end.setblocking(False)
            try:
                while True:
                    sent += end.send(bytes(2**16))
            except BlockingIOError:
                pass
except OSError:
    print(len(kept) <= 32, sent < 2**24)
"""
    assert run_python(program, limits=LIMITS).stdout == "True True\n"


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="programs of other users share the user that runs them")
def test_programs_at_the_same_time_have_users_of_their_own(monkeypatch):
    monkeypatch.setattr(sandbox, "_FREE_UIDS", range(61180, 61184))  # which no other test has
    program = "import os, time\ntime.sleep(0.5)\nprint(os.getuid())"
    with ThreadPoolExecutor(4) as pool:
        users = [ran.stdout for ran in pool.map(run_python, [program] * 4)]
    assert len(set(users)) == 4
    with sandbox._free_uid() as first, sandbox._free_uid() as second:
        assert first != second


@needs_sandbox
def test_threads_and_subprocesses_work():
    program = """
import subprocess, sys, threading
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
print(subprocess.run([sys.executable, "-c", "print('process')"], capture_output=True, text=True).stdout)
"""
    assert run_python(program, limits=Limits()).stdout == "thread\nprocess\n\n"


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(60)", "import threading; threading.Event().wait()"],
)
def test_an_endless_program_is_killed_at_its_limit(program):
    started = time.monotonic()
    ran = run_python(program, limits=Limits(seconds=0.3))
    assert (ran.ended, ran.exit_code) == ("time", None)
    assert time.monotonic() - started < 2


@needs_sandbox
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_ends_at_its_limit(stream):
    ran = run_python(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", limits=LIMITS)
    assert ran.ended == "output"
    assert len(getattr(ran, stream)) == LIMITS.output_kb * 1024


@needs_sandbox
def test_a_daemon_that_a_program_leaves_behind_is_killed_with_it():
    program = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("left")
"""
    assert run_python(named("daemon") + program, limits=LIMITS).stdout == "left\n"
    assert soon(lambda: "daemon" not in names())


@needs_sandbox
def test_a_program_cannot_kill_what_runs_it():
    program = """
import os, signal
for pid in (os.getppid(), 1, -1, 0):
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            number = signal.SIGTERM
        try:
            os.kill(pid, number)
        except OSError:
            pass
print("still here")
"""
    assert run_python(program, limits=LIMITS).stdout == "still here\n"


@needs_sandbox
def test_a_sandbox_ends_with_the_process_that_made_it():
    program = named("orphan") + "import time; time.sleep(60)"
    script = f"from qerl.rewards.sandbox import *; run_python({program!r}, limits=Limits(seconds=60))"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert soon(lambda: "orphan" in names())
    finally:
        process.kill()
        process.wait()
    assert soon(lambda: "orphan" not in names())


def test_without_bubblewrap_nothing_runs_and_a_sentence_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.obstacle.cache_clear()
    try:
        with pytest.raises(
            QeRLError, match="only inside bubblewrap, which is not installed here; get it with apt-get"
        ):
            run_python("open('/tmp/ran', 'w')")
    finally:
        monkeypatch.undo()
        sandbox.obstacle.cache_clear()


def test_where_bubblewrap_may_make_no_namespaces_nothing_runs_and_its_own_words_are_said(
    monkeypatch, tmp_path
):
    refusing = tmp_path / "bwrap"
    refusing.write_text(
        f"#!{shutil.which('sh')}\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox.obstacle.cache_clear()
    try:
        with pytest.raises(
            QeRLError, match=r"cannot make a sandbox here \(bwrap: No permissions .*\); allow user"
        ):
            run_python("print(1)")
    finally:
        monkeypatch.undo()
        sandbox.obstacle.cache_clear()


def test_tests_are_not_skipped_where_the_sandbox_is_required(monkeypatch):
    monkeypatch.setattr(sandbox, "obstacle", lambda: "There is no sandbox.")
    monkeypatch.delenv(REQUIRED, raising=False)
    assert skips()
    monkeypatch.setenv(REQUIRED, "bubblewrap")
    assert not skips()


def test_the_memory_of_a_program_is_that_of_all_its_processes():
    assert 4 * 512 < Limits().most_mb < 2 * 4 * 512


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0}, {"memory_mb": -1}, {"processes": 0}, {"output_kb": True}, {"seconds": "5"}]
)
def test_a_limit_is_a_number_with_a_least_value(wrong):
    with pytest.raises(QeRLError, match=r"of a program is .*; it must be a number, at least"):
        Limits(**wrong)


def named(name: str) -> str:
    """The beginning of a program that gives itself a name by which this machine knows its processes."""
    return f"import ctypes\nctypes.CDLL(None).prctl(15, {mark(name).encode()!r})\n"  # PR_SET_NAME


def mark(name: str) -> str:
    return f"{name}-{os.getpid()}"[:15]


def names() -> set[str]:
    """Which of the names this machine's processes have."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            found.add((folder / "comm").read_text().strip())
        except OSError:
            continue
    return {name for name in ("bomb", "daemon", "orphan") if mark(name) in found}


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
