"""CUDA C++ kernels compiled at run time.

NVRTC and the driver come with torch's own dependencies (the cuda-bindings package), so nobody needs a CUDA
toolkit. Kernels are launched through the driver for one reason beyond that: programmatic dependent launch,
which lets a kernel start reading its weights while the one before it still runs, is a launch attribute.
"""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qerl.errors import QeRLError


def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise QeRLError(
            "The package cuda-bindings is missing, so no CUDA kernel can be compiled: install it, or use the "
            "portable engine."
        ) from error
    return driver, nvrtc


def current(device: torch.device | int) -> AbstractContextManager[Any]:
    """Makes the device the current one, which launches, streams and questions about memory go to; a CPU is
    none."""
    on_cpu = isinstance(device, torch.device) and device.type != "cuda"
    return nullcontext() if on_cpu else torch.cuda.device(device)


def _check(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise QeRLError(f"{what} failed with {status.name}.")
    return values[0] if values else None


class Kernel:
    """A compiled kernel of the device that is current when it is made.

    Args:
        path: Source file.
        name: Name of its ``extern "C"`` kernel.
        defines: Preprocessor macros, the kernel's compile-time parameters.
    """

    def __init__(self, path: Path, name: str, defines: dict[str, int]) -> None:
        driver, nvrtc = _bindings()
        torch.cuda.current_stream()  # makes torch's context current
        self._device = torch.cuda.current_device()
        self._context = _check(driver.cuCtxGetCurrent(), "Asking for the CUDA context")
        major, minor = torch.cuda.get_device_capability()
        # The letter gives access to a generation's own instructions, such as wgmma.
        target = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
        options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
        options += [f"-D{key}={value}".encode() for key, value in defines.items()]
        source = path.read_text().encode()
        program = _check(nvrtc.nvrtcCreateProgram(source, path.name.encode(), 0, [], []), "NVRTC")
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(status) != 0:
            size = _check(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC")
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise QeRLError(f"{path.name} does not compile for {target}: {log.decode(errors='replace')}")
        size = _check(nvrtc.nvrtcGetCUBINSize(program), "NVRTC")
        cubin = b" " * size
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "NVRTC")
        self._module = _check(driver.cuModuleLoadData(cubin), f"Loading {path.name}")
        self._function = _check(
            driver.cuModuleGetFunction(self._module, name.encode()), f"Loading {path.name}"
        )
        properties: Any = torch.cuda.get_device_properties()
        most = properties.shared_memory_per_block_optin
        attributes = driver.CUfunction_attribute
        static = attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        most -= _check(driver.cuFuncGetAttribute(static, self._function), f"{name}: shared memory")
        dynamic = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._function, dynamic, most), f"{name}: shared memory")
        self._driver = driver
        self._name = name

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        pointers: Sequence[torch.Tensor],
        integers: Sequence[int],
    ) -> None:
        """Launches on the device's current stream; the kernel may begin before the one ahead of it has ended.

        The calling thread may be one of autograd's, which has a current device but perhaps no context yet.
        """
        driver = self._driver
        with current(self._device):
            _check(driver.cuCtxSetCurrent(self._context), "Setting the CUDA context")
            self._launch(grid, threads, shared_bytes, pointers, integers)

    def _launch(
        self,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        pointers: Sequence[torch.Tensor],
        integers: Sequence[int],
    ) -> None:
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = [attribute]
        config.numAttrs = 1
        values = tuple(p.data_ptr() for p in pointers) + tuple(integers)
        types = (ctypes.c_void_p,) * len(pointers) + (ctypes.c_int,) * len(integers)
        _check(driver.cuLaunchKernelEx(config, self._function, (values, types), 0), f"Launching {self._name}")


@cache
def kernel(path: Path, name: str, defines: tuple[tuple[str, int], ...], device: int) -> Kernel:
    """The kernel with these compile-time parameters, compiled for a device on first use."""
    with current(device):
        return Kernel(path, name, dict(defines))
