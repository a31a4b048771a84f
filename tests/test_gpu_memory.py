"""How much memory a run takes for all there is: a card's own, a limit, a part of one shared with a CPU."""

import sys
from enum import IntEnum
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from qerl import host_memory
from qerl.errors import QeRLError
from qerl.gpu_memory import free_bytes, keep_within_limit, total_bytes, usable_bytes
from qerl.kernels.cards import CARDS
from qerl.rollout.paged.limits import cache_budget
from qerl.rollout.paged.machine import Cuda
from qerl.rollout.paged.memory import SwitchedMemory

GIB = 2**30
CUDA = torch.device("cuda", 0)
SOLD = {
    "RTX 4080": 16, "RTX 5080": 16, "RTX 3090": 24, "RTX 4090": 24, "A30": 24, "RTX 5090": 32,
    "A100 40GB": 40, "RTX A6000": 48, "A100": 80, "H100": 80, "RTX PRO 6000": 96, "H200": 141, "B200": 180,
}  # fmt: skip
"""GB with which GPUs are sold whose memory torch shows without error correction."""


def test_a_size_leaves_a_little_less_than_cards_show_that_are_sold_with_it():
    shown = {name: gib for card in CARDS.values() for name, gib in card.gpus}
    for name, size in SOLD.items():
        assert 0.985 * shown[name] < usable_bytes(size) / GIB < shown[name], name
    assert usable_bytes(0.1) == 0


class Gpu:
    """A card of which some memory is used, ``reserved`` of that by torch's allocator."""

    def __init__(self, total: int, used: int, reserved: int, integrated: bool = False) -> None:
        self.properties = SimpleNamespace(total_memory=total, is_integrated=integrated)
        self.used, self.reserved, self.allowed = used, reserved, total

    def allow(self, fraction: float, device: int) -> None:
        assert device == 0, "torch takes an index, and no device without one"
        self.allowed = round(fraction * self.properties.total_memory)


@pytest.fixture
def gpu(monkeypatch):
    def make(**given) -> Gpu:
        one = Gpu(**given)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one.properties)
        total = one.properties.total_memory
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total - one.used, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: one.reserved)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", one.allow)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        return one

    monkeypatch.delenv("QERL_MEMORY_GB", raising=False)
    return make


def test_a_card_without_a_limit_is_believed_and_torch_left_alone(gpu):
    card = gpu(total=140 * GIB, used=9 * GIB, reserved=7 * GIB)
    assert (total_bytes(CUDA), free_bytes(CUDA)) == (140 * GIB, 131 * GIB)
    card.allowed = 5
    keep_within_limit(CUDA)
    assert card.allowed == 5


def test_a_limit_makes_a_card_smaller_for_plan_engine_and_torch(gpu, monkeypatch):
    card = gpu(total=140 * GIB, used=9 * GIB, reserved=7 * GIB)
    monkeypatch.setenv("QERL_MEMORY_GB", "24")
    assert total_bytes(CUDA) == usable_bytes(24) < 24 * GIB
    assert free_bytes(CUDA) == usable_bytes(24) - 9 * GIB
    keep_within_limit(torch.device("cuda"))
    assert card.allowed == pytest.approx(usable_bytes(24) - 2 * GIB, abs=1), "2 GiB do not go through torch"
    card.used += 10 * GIB  # keys and values
    keep_within_limit(CUDA)
    assert card.allowed == pytest.approx(usable_bytes(24) - 12 * GIB, abs=1)
    model = torch.nn.Linear(64, 64, bias=False)
    given = Cuda().cache_bytes(model)
    assert given == cache_budget(usable_bytes(24), 4 * 64 * 64, 64 * 64, free_bytes(CUDA))
    beside = Cuda().cache_bytes(model, freed=3 * GIB)
    free = free_bytes(CUDA) + 3 * GIB
    assert beside == cache_budget(usable_bytes(24), 4 * 64 * 64, 64 * 64, free) > given
    card.used = 30 * GIB
    assert free_bytes(CUDA) == 0
    assert free_bytes(CUDA, freed=20 * GIB) == usable_bytes(24) - 10 * GIB, "6 GiB above the limit go first"
    beside = Cuda().cache_bytes(model, freed=10 * GIB)
    free = usable_bytes(24) - 20 * GIB
    assert 0 < beside == cache_budget(usable_bytes(24), 4 * 64 * 64, 64 * 64, free) < given


def test_a_limit_above_what_the_card_has_changes_nothing(gpu, monkeypatch):
    card = gpu(total=22 * GIB, used=0, reserved=0)
    monkeypatch.setenv("QERL_MEMORY_GB", "24")
    assert total_bytes(CUDA) == free_bytes(CUDA) == 22 * GIB
    card.allowed = 5
    keep_within_limit(CUDA)
    assert card.allowed == 5


@pytest.mark.parametrize("text", ["much", "0", "-3", "nan", "inf"])
def test_a_limit_that_is_no_memory_is_refused(gpu, monkeypatch, text):
    gpu(total=22 * GIB, used=0, reserved=0)
    monkeypatch.setenv("QERL_MEMORY_GB", text)
    with pytest.raises(QeRLError, match=r"QERL_MEMORY_GB is '.*'; set it to a GPU's memory in GB"):
        total_bytes(CUDA)


def test_a_memory_shared_with_the_cpu_is_not_believed(gpu, monkeypatch, tmp_path):
    """A DGX Spark with 100 GiB of 120 in the page cache: the driver says that 20 are free."""
    card = gpu(total=120 * GIB, used=100 * GIB, reserved=2 * GIB, integrated=True)
    system = tmp_path / "meminfo"
    system.write_text(f"MemTotal: {120 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:   {110 * 2**20} kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", system)
    assert total_bytes(CUDA) == 90 * GIB
    assert free_bytes(CUDA) == 80 * GIB, "30 of the 110 stay with the system"
    keep_within_limit(CUDA)
    assert card.allowed == pytest.approx(82 * GIB, abs=1)
    monkeypatch.setenv("QERL_MEMORY_GB", "16")
    assert total_bytes(CUDA) == usable_bytes(16)


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver(MagicMock):
    """What `cuda.bindings.driver` does about memory under one range; the call named ``fails`` fails once."""

    fails, created, held, mapped = "", 0, (), ()

    def _result(self, name, *values):
        if name == self.fails:
            self.fails = ""
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        return Status.CUDA_SUCCESS, *values

    def cuMemGetAllocationGranularity(self, *_):
        return Status.CUDA_SUCCESS, 2**21

    def cuMemAddressReserve(self, *_):
        return Status.CUDA_SUCCESS, 2**40

    def cuMemCreate(self, *_):
        result = self._result("cuMemCreate", self.created)
        if not result[0]:
            self.held, self.created = (*self.held, self.created), self.created + 1
        return result

    def cuMemMap(self, address, size, offset, handle, flags):
        result = self._result("cuMemMap")
        if not result[0]:
            assert not self.mapped, "the range has memory already"
            self.mapped = (handle,)
        return result

    def cuMemSetAccess(self, *_):
        return self._result("cuMemSetAccess")

    def cuMemUnmap(self, *_):
        assert self.mapped
        self.mapped = ()
        return (Status.CUDA_SUCCESS,)

    def cuMemRelease(self, handle):
        assert handle not in self.mapped
        self.held = tuple(each for each in self.held if each != handle)
        return (Status.CUDA_SUCCESS,)


@pytest.mark.parametrize("fails", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_failed_mapping_holds_nothing_and_the_next_one_is_right(gpu, monkeypatch, fails):
    gpu(total=80 * GIB, used=0, reserved=0)
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = SwitchedMemory(GIB)
    memory.give_up()
    assert memory.given_up and driver.held == driver.mapped == ()
    driver.fails = fails
    with pytest.raises(QeRLError, match=f"{fails} failed with CUDA_ERROR_OUT_OF_MEMORY"):
        memory.take_back()
    assert memory.given_up and driver.held == driver.mapped == ()
    memory.take_back()
    assert not memory.given_up and driver.held == driver.mapped != ()
    memory.close()
    assert driver.held == driver.mapped == ()
