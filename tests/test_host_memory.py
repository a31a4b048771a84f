"""How much of the CPU's memory a run may take: of the system, of its control groups, of what it is told."""

import pytest

from qerl import host_memory
from qerl.errors import QeRLError
from qerl.host_memory import group_limit, host_bytes

GIB = 2**30
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(own, groups)``: 100 GiB are available, the process is in groups `own`, and folders of groups
    have a limit, a use, and bytes of files that may be dropped."""
    for name in ("QERL_HOST_GB", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_MEMINFO", "_OWN_GROUPS", "_GROUPS"):
        monkeypatch.setattr(host_memory, name, tmp_path / name)

    def make(own="", groups=()):
        (tmp_path / "_MEMINFO").write_text(f"MemTotal: 1 kB\nMemAvailable:  {100 * 2**20} kB\n")
        (tmp_path / "_OWN_GROUPS").write_text(own)
        for folder, (limit_name, usage_name, dropped_name), limit, used, dropped in groups:
            path = tmp_path / "_GROUPS" / folder
            path.mkdir(parents=True, exist_ok=True)
            (path / limit_name).write_text(f"{limit}\n")
            (path / usage_name).write_text(f"{used}\n")
            (path / "memory.stat").write_text(f"anon 5\n{dropped_name} {dropped}\n")

    return make


def test_a_system_that_does_not_say_is_not_known(machine):
    assert host_bytes(1) is None and group_limit() is None


def test_processes_share_what_the_system_has(machine, monkeypatch):
    machine()
    assert (host_bytes(1), host_bytes(4)) == (100 * GIB, 25 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert host_bytes(4) == 50 * GIB, "two of four are on another machine"


@pytest.mark.parametrize(
    ("own", "groups", "limit", "left"),
    [
        ("0::/\n", [("", V2, 64 * GIB, 10 * GIB, 4 * GIB)], 64, 58),
        ("0::/\n", [("", V2, "max", 10 * GIB, 0)], None, 100),
        ("0::/job/step\n", [("job", V2, 32 * GIB, GIB, 0), ("job/step", V2, "max", GIB, 0)], 32, 31),
        ("0::/job/step\n", [("job", V2, 32 * GIB, GIB, 0), ("job/step", V2, 8 * GIB, GIB, 0)], 8, 7),
        ("0::/job\n", [("job", V2, 8 * GIB, 9 * GIB, 0)], 8, 0),
        ("0::/job\n", [("other", V2, 8 * GIB, GIB, 0)], None, 100),
        ("0::/job\n", [("job", V2, 800 * GIB, GIB, 0)], 800, 100),
        # version 1, from outside a container and from inside, where the path is that outside
        ("5:cpu,cpuacct:/job\n4:memory:/job\n", [("memory/job", V1, 16 * GIB, 2 * GIB, GIB)], 16, 15),
        ("4:memory:/docker/0abc\n0::/\n", [("memory", V1, 16 * GIB, 2 * GIB, 0)], 16, 14),
        ("4:memory:/\n", [("memory", V1, 9223372036854771712, GIB, 0)], None, 100),
        ("4:cpu:/job\n", [("memory/job", V1, 16 * GIB, 2 * GIB, 0)], None, 100),
        ("1:cpu:/\n0::/job\n", [("unified/job", V2, 16 * GIB, 2 * GIB, 0)], 16, 14),
    ],
)
def test_the_least_of_the_own_groups_counts(machine, own, groups, limit, left):
    machine(own, groups)
    assert group_limit() == (None if limit is None else limit * GIB)
    assert host_bytes(1) == left * GIB


def test_what_is_asked_for_takes_the_place_of_all_of_it(machine, monkeypatch):
    machine("0::/\n", [("", V2, 64 * GIB, 10 * GIB, 0)])
    for asked, given in (("200", 200e9), ("1.5", 1.5e9)):
        monkeypatch.setenv("QERL_HOST_GB", asked)
        assert (host_bytes(1), host_bytes(2)) == (given, given / 2)
    for wrong in ("all", "0", "-3", "nan", "inf"):
        monkeypatch.setenv("QERL_HOST_GB", wrong)
        with pytest.raises(QeRLError, match=rf"QERL_HOST_GB is '{wrong}'; set it to the CPU memory"):
            host_bytes(1)
