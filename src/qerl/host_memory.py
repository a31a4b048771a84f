"""The CPU memory that a run may take for offloaded inputs of layers.

Linux says how much it could give without swapping, and a container or a job of a cluster may have a limit of
its own, which that figure does not include: the control groups of this process have it. Neither includes
memory that a virtual machine could still get from its host, where memory grows with use: `QERL_HOST_GB=200`
replaces both, for all processes of a run on one machine together, in 10^9 bytes as a plan prints them.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from qerl.errors import QeRLError

HOST = "QERL_HOST_GB"
"""Environment variable: 10^9 bytes of the CPU's memory that a run may take on this machine."""

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")

_UNLIMITED = 2**62
"""Limits from here on mean no limit, for which version 1 writes the largest number."""

_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Files with limit and use of a group in versions 2 and 1, by the controller that /proc/self/cgroup names."""


def gigabytes(variable: str, wanted: str) -> float | None:
    """Return the value of an environment variable; None where it is not set. ``wanted`` describes it, with an
    example.

    Raises:
        QeRLError: It is no amount of memory.
    """
    text = os.environ.get(variable, "")
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise QeRLError(f"{variable} is {text!r}; set it to {wanted}, or remove it.")
    return found


def host_gb() -> float | None:
    """The value of `QERL_HOST_GB`; None where it is not set.

    Raises:
        QeRLError: It is no amount of memory.
    """
    return gigabytes(HOST, "the CPU memory that a run may take in GB, such as 200")


def asked_bytes(processes: int) -> int | None:
    """Return the bytes that `QERL_HOST_GB` gives each process of a run; None where it is not set.

    Args:
        processes: Processes of the run; all are on this machine unless torchrun says how many are.

    Raises:
        QeRLError: `QERL_HOST_GB` is no amount of memory.
    """
    asked = host_gb()
    return None if asked is None else _share(round(asked * 1e9), processes)


def host_bytes(processes: int) -> int | None:
    """Return the bytes of CPU memory that each process of a run may take; None where the system does not say.

    Raises:
        QeRLError: `QERL_HOST_GB` is no amount of memory.
    """
    asked = asked_bytes(processes)
    if asked is not None or not _MEMINFO.is_file():
        return asked
    left = [limit - used for limit, used in _limits()]
    return _share(max(0, min([available_bytes(), *left])), processes)


def available_bytes() -> int:
    """Bytes that the system could give a program without swapping."""
    lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    (found,) = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(found[1])


def group_limit() -> int | None:
    """Return the bytes that the control groups of this process, such as a container's, allow; None without a
    limit."""
    return min((limit for limit, _ in _limits()), default=None)


def _share(total: int, processes: int) -> int:
    return total // int(os.environ.get("LOCAL_WORLD_SIZE", processes))


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each limited control group of this process.

    Inactive cached files count as unused, because a group that needs memory drops them first.
    """
    for folder, (limit, usage) in _own_groups():
        try:
            text = (folder / limit).read_text(encoding="ascii").strip()
            used = int((folder / usage).read_text(encoding="ascii"))
            words = [line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines()]
        except OSError:  # the uppermost group of version 2 has none of these files
            continue
        if text != "max" and int(text) < _UNLIMITED:
            stat = {name: int(value) for name, value in words}
            yield int(text), used - stat.get("total_inactive_file", stat.get("inactive_file", 0))


def _own_groups() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders of the groups of this process and of those above them, which limit it as well."""
    if not _OWN_GROUPS.is_file():
        return
    for line in _OWN_GROUPS.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in _FILES.keys() & set(controllers.split(",")):
            # Version 2 has a folder of its own where both are mounted. A container that sees only its own
            # groups has them at the top, and the path may be the one outside of the container.
            tops = [_GROUPS, _GROUPS / "unified"] if not name else [_GROUPS / name]
            for top in tops:
                below = top / path.lstrip("/")
                for folder in (below, *below.parents):
                    if folder.is_relative_to(top):
                        yield folder, _FILES[name]
