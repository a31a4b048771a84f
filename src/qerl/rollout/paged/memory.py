"""Memory for keys and values; on a GPU it can be given up and taken back at the same addresses.

Rollout and training want the same gigabytes at different times: keys and values here, activations there. A
captured CUDA graph holds addresses, so memory that comes back elsewhere would cost a recapture at every step.
The driver's virtual memory management separates the two: a range of addresses is reserved once, and physical
memory is put under it and taken away again (CUDA driver API, "Virtual Memory Management").

torch's allocator keeps memory that training freed; its cache is emptied when the driver has too little left.
"""

import math
import weakref
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from qerl.errors import QeRLError
from qerl.gpu_memory import free_bytes, keep_within_limit


class Memory(Protocol):
    """A range of bytes at fixed addresses."""

    @property
    def given_up(self) -> bool:
        """True if there is no memory under the addresses."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Return a view of the range from byte ``offset`` on."""

    def give_up(self) -> None:
        """Free the memory, keep the addresses."""

    def take_back(self) -> None:
        """Put memory of undefined content under the addresses again."""

    def close(self) -> None:
        """Free memory and addresses for good."""


class PlainMemory:
    """Memory of torch's allocator, which stays until it is closed.

    Args:
        size: Number of bytes.
        device: Device of the memory.
    """

    given_up = False

    def __init__(self, size: int, device: torch.device | str) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """See `Memory.tensor`."""
        size = math.prod(shape) * dtype.itemsize
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    def give_up(self) -> None:
        """Do nothing: the memory is the allocator's."""

    def take_back(self) -> None:
        """Do nothing: the memory was never given up."""

    def close(self) -> None:
        """Hand the memory back to the allocator."""
        self._bytes = self._bytes.new_empty(0)


class SwitchedMemory:
    """A range of addresses on the current GPU, with memory under it from the start.

    Args:
        size: Number of bytes.

    Raises:
        QeRLError: The GPU has too little free memory.
    """

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        torch.cuda.current_stream()  # makes torch's context current
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._location = driver.CUmemAllocationProp()
        self._location.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._location.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.location.id = self._device.index
        unit = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = self._call("cuMemGetAllocationGranularity", self._location, unit)
        self.size = -(-size // step) * step
        self._address = self._call("cuMemAddressReserve", self.size, 0, 0, 0)
        self._handle: list[Any] = []  # of the memory under the range, empty when it is given up
        self._close = weakref.finalize(self, _free, driver, self._address, self.size, self._handle)
        self.take_back()

    @property
    def given_up(self) -> bool:
        """True if there is no memory under the addresses; reading or writing there is then an error."""
        return not self._handle

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Return a view of the range from byte ``offset`` on; it does not keep the range alive."""
        size = math.prod(shape) * dtype.itemsize
        if offset + size > self.size:
            raise QeRLError(f"A tensor of {size} bytes at {offset} exceeds a range of {self.size}.")
        whole = torch.as_tensor(_Range(int(self._address), self.size), device=self._device)
        return whole[offset : offset + size].view(dtype).view(shape)

    def give_up(self) -> None:
        """Free the memory under the addresses; its content is lost."""
        if self._handle:
            torch.cuda.synchronize(self._device)
            self._call("cuMemUnmap", self._address, self.size)
            self._call("cuMemRelease", self._handle.pop())
            keep_within_limit(self._device)

    def take_back(self) -> None:
        """Put memory of undefined content under the addresses again.

        Raises:
            QeRLError: The GPU has too little free memory, or the driver refuses; no memory is held then.
        """
        if self._handle:
            return
        if free_bytes(self._device) < self.size:
            torch.cuda.empty_cache()
        free = free_bytes(self._device)
        if free < self.size:
            raise QeRLError(
                f"Keys and values need {self.size / 1e9:.1f} GB of GPU memory and {free / 1e9:.1f} GB are "
                "free: lower max_sequences or max_completion_length."
            )
        with ExitStack() as undone:
            handle = self._call("cuMemCreate", self.size, self._location, 0)
            undone.callback(self._driver.cuMemRelease, handle)
            self._call("cuMemMap", self._address, self.size, 0, handle, 0)
            undone.callback(self._driver.cuMemUnmap, self._address, self.size)
            access = self._driver.CUmemAccessDesc()
            access.location = self._location.location
            access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._call("cuMemSetAccess", self._address, self.size, [access], 1)
            undone.pop_all()
        self._handle.append(handle)
        keep_within_limit(self._device)

    def close(self) -> None:
        """Free memory and addresses for good."""
        self._close()
        keep_within_limit(self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise QeRLError(f"{name} failed with {status.name}.")
        return values[0] if values else None


class _Range:
    """Bytes at an address, in the form in which torch accepts memory of other allocators."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _free(driver: Any, address: Any, size: int, handle: list[Any]) -> None:
    if handle:
        driver.cuCtxSynchronize()
        driver.cuMemUnmap(address, size)
        driver.cuMemRelease(handle.pop())
    driver.cuMemAddressFree(address, size)
