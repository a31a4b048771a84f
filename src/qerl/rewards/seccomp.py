"""The system call filter that bubblewrap installs in the sandbox.

A filter is a program of classic BPF that the kernel runs on each system call (seccomp(2)). This one allows
the calls of Linux 5.0, except those below. Every later call fails as "not implemented", as on an older
kernel, for which C libraries have fallbacks: calls that Linux adds later (a mount API, io_uring, memory that
belongs to no process) are no way out.

The calls below fail as "not permitted". They circumvent the limits (shared memory, files in memory and pages
in pipes are part of no address space, and the buffers of sockets and pipes can be enlarged), read other
processes, or reach parts of the kernel that programs seldom use: namespaces, mounts, tracing, keys, BPF,
performance counters, modules, clocks.

Sockets may be local or of the Internet protocols; the sandbox has a network of its own, without any other
host. Other families, such as AF_VSOCK between virtual machines and their hosts, ignore network namespaces,
and fail as "not supported".
"""

import platform
import struct

_REFUSED = """\
# Memory that is in no address space.
shmget 29 194, shmat 30 196, msgget 68 186, semget 64 190, mq_open 240 180, memfd_create 319 279,
splice 275 76, tee 276 77, vmsplice 278 75, io_setup 206 0, inotify_init 253 -, inotify_init1 294 26,
fanotify_init 300 262
# Other processes, and where memory lies.
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, migrate_pages 256 238,
move_pages 279 239, mbind 237 235, set_mempolicy 238 237
# Namespaces and file systems.
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
quotactl 179 60, acct 163 89, swapon 167 224, swapoff 168 225, name_to_handle_at 303 264,
open_by_handle_at 304 265, lookup_dcookie 212 18, nfsservctl 180 42
# Parts of the kernel.
add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241,
userfaultfd 323 282, init_module 175 105, finit_module 313 273, delete_module 176 106,
kexec_load 246 104, kexec_file_load 320 294, reboot 169 142, syslog 103 116, vhangup 153 58,
personality 135 92, uselib 134 -, modify_ldt 154 -, iopl 172 -, ioperm 173 -, sethostname 170 161,
setdomainname 171 162, adjtimex 159 171, settimeofday 164 170, clock_settime 227 112,
clock_adjtime 305 266
"""
"""Names of calls with their numbers on x86_64 and aarch64; a dash where there is no such call."""

_CLONE, _SOCKET, _SOCKETPAIR = (56, 220), (41, 198), (53, 199)
_SETSOCKOPT, _FCNTL = (54, 208), (72, 25)

# Processor -> its place above, its audit architecture, and the first number that Linux 5.0 does not have.
_PROCESSORS = {"x86_64": (0, 0xC000003E, 335), "aarch64": (1, 0xC00000B7, 295)}

_NEW_NAMESPACE = 0x7E020000  # flags of clone
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_SOL_SOCKET = 1
_LARGER_BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both with FORCE
_F_SETPIPE_SZ = 1031

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32)  # offsets in `struct seccomp_data`
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97


def seccomp_filter() -> bytes | None:
    """Return the filter for this machine's processor, or None if its call numbers are not known here."""
    if platform.machine() not in _PROCESSORS:
        return None
    place, architecture, first_unknown = _PROCESSORS[platform.machine()]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, yes=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_fail(_AT_LEAST, first_unknown, _ENOSYS),
    ]
    calls = ",".join(line for line in _REFUSED.splitlines() if not line.startswith("#")).split(",")
    for _, *numbers in map(str.split, filter(None, calls)):
        if numbers[place] != "-":
            program += _fail(_EQUAL, int(numbers[place]), _EPERM)
    namespaces = _fail(_ANY_BIT, _NEW_NAMESPACE, _EPERM)
    program += _of_call(_CLONE[place], _step(_LOAD, _ARGUMENTS[0]), *namespaces)
    for call in (_SOCKET, _SOCKETPAIR):
        families = [step for family in _FAMILIES for step in _answer(_EQUAL, family, _ALLOW)]
        other = _step(_RETURN, _FAIL | _EAFNOSUPPORT)
        program += _of_call(call[place], _step(_LOAD, _ARGUMENTS[0]), *families, other)
    larger = [step for option in _LARGER_BUFFERS for step in _fail(_EQUAL, option, _EPERM)]
    program += _of_call(
        _SETSOCKOPT[place],
        _step(_LOAD, _ARGUMENTS[1]),
        _step(_EQUAL, _SOL_SOCKET, no=1 + len(larger)),
        _step(_LOAD, _ARGUMENTS[2]),
        *larger,
    )
    program += _of_call(_FCNTL[place], _step(_LOAD, _ARGUMENTS[1]), *_fail(_EQUAL, _F_SETPIPE_SZ, _EPERM))
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _of_call(number: int, *steps: bytes) -> list[bytes]:
    """Apply steps to the call of this number alone; allow the call if none of them returns."""
    return [_step(_EQUAL, number, no=len(steps) + 1), *steps, _step(_RETURN, _ALLOW)]


def _fail(compare: int, value: int, error: int) -> list[bytes]:
    """Fail with the error if the comparison holds, else continue."""
    return _answer(compare, value, _FAIL | error)


def _answer(compare: int, value: int, answer: int) -> list[bytes]:
    """Return the answer if the comparison holds, else continue."""
    return [_step(compare, value, no=1), _step(_RETURN, answer)]


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Encode one instruction; `yes` and `no` are the numbers of instructions to skip."""
    return struct.pack("=HBBI", code, yes, no, value)
