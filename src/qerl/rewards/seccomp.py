"""System calls that a program in the sandbox has no use for, as the filter that bubblewrap installs.

A filter is a program of classic BPF that the kernel runs on each system call (seccomp(2)). This one refuses
with "not permitted" what would get around the limits (shared memory of System V and files in memory are not
part of a process's address space) and what opens parts of the kernel that programs seldom touch: namespaces,
tracing, keys, BPF, performance counters, io_uring. All other calls go through.
"""

import platform
import struct

# (audit architecture, number of clone, numbers of the calls that are refused)
_CALLS = {
    "x86_64": (
        0xC000003E,
        56,
        {"msgget": 68, "semget": 64, "shmget": 29, "shmat": 30, "memfd_create": 319, "ptrace": 101}
        | {"unshare": 272, "setns": 308, "mount": 165, "add_key": 248, "request_key": 249, "keyctl": 250}
        | {"bpf": 321, "perf_event_open": 298, "userfaultfd": 323},
    ),
    "aarch64": (
        0xC00000B7,
        220,
        {"msgget": 186, "semget": 190, "shmget": 194, "shmat": 196, "memfd_create": 279, "ptrace": 117}
        | {"unshare": 97, "setns": 268, "mount": 40, "add_key": 217, "request_key": 218, "keyctl": 219}
        | {"bpf": 280, "perf_event_open": 241, "userfaultfd": 282},
    ),
}
_EVERYWHERE = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
_CLONE3 = 435
_NEW_NAMESPACE = 0x7E020000  # flags of clone
_FOREIGN_NUMBERS = 0x40000000  # calls of the x32 architecture, which have numbers of their own

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in what a filter sees of a call
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


def seccomp_filter() -> bytes | None:
    """The filter for this machine's processor; None if the numbers of its calls are not known here."""
    if platform.machine() not in _CALLS:
        return None
    architecture, clone, refused = _CALLS[platform.machine()]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, yes=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_answer(_AT_LEAST, _FOREIGN_NUMBERS, _EPERM),
        *_answer(_EQUAL, _CLONE3, _ENOSYS),  # its flags lie in memory; the C library falls back to clone
    ]
    for number in (*refused.values(), *_EVERYWHERE.values()):
        program += _answer(_EQUAL, number, _EPERM)
    program += [
        _step(_EQUAL, clone, no=3),
        _step(_LOAD, _FIRST_ARGUMENT),
        *_answer(_ANY_BIT, _NEW_NAMESPACE, _EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _answer(compare: int, value: int, error: int) -> list[bytes]:
    """Fail with the error where the comparison holds, else go on."""
    return [_step(compare, value, no=1), _step(_RETURN, _FAIL | error)]


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are how many to pass over."""
    return struct.pack("=HBBI", code, yes, no, value)
