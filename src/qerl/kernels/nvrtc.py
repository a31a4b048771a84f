"""CUDA C++ kernels compiled at run time.

NVRTC and the driver come with torch's own dependencies (the cuda-bindings package), so no CUDA toolkit is
needed. Launching through the driver has a second reason: programmatic dependent launch, which lets a kernel
start reading its weights while its predecessor still runs, is a launch attribute. The target architecture and
the use of that attribute come from the GPU's entry in `qerl.kernels.cards`.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qerl.errors import QeRLError
from qerl.kernels.cards import card_of


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
    """Return a context in which the device is current for launches, streams and memory queries; for a CPU,
    one that does nothing."""
    on_cpu = isinstance(device, torch.device) and device.type != "cuda"
    return nullcontext() if on_cpu else torch.cuda.device(device)


def _check(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise QeRLError(f"{what} failed with {status.name}.")
    return values[0] if values else None


def compile_source(path: Path, defines: Mapping[str, int], target: str) -> bytes:
    """Return machine code for ``sm_XX``, or for ``compute_XX`` PTX that a driver translates; needs no GPU.

    Args:
        path: Source file. It may include headers (.cuh) of its folder.
        defines: Preprocessor macros, the kernel's compile-time parameters.
        target: Value of NVRTC's option --gpu-architecture.

    Raises:
        QeRLError: The source does not compile, or cuda-bindings is not installed.
    """
    _, nvrtc = _bindings()
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
    options += [f"-D{key}={value}".encode() for key, value in defines.items()]
    headers = sorted(path.parent.glob("*.cuh"))
    names, texts = [header.name.encode() for header in headers], [header.read_bytes() for header in headers]
    created = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), len(headers), texts, names)
    program = _check(created, "NVRTC")
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(status) != 0:
        log = _output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        raise QeRLError(f"{path.name} does not compile for {target}: {log.decode(errors='replace')}")
    if target.startswith("compute_"):
        return _output(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    return _output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)


def _output(program: Any, size_of: Callable[..., Any], write: Callable[..., Any]) -> bytes:
    written = b" " * _check(size_of(program), "NVRTC")
    _check(write(program, written), "NVRTC")
    return written


class Kernel:
    """A kernel compiled for the device that is current at construction.

    Args:
        path: Source file.
        name: Name of its ``extern "C"`` kernel.
        defines: Preprocessor macros, the kernel's compile-time parameters.
    """

    def __init__(self, path: Path, name: str, defines: Mapping[str, int]) -> None:
        driver, _ = _bindings()
        torch.cuda.current_stream()  # makes torch's context current
        self._device = torch.cuda.current_device()
        self._context = _check(driver.cuCtxGetCurrent(), "Asking for the CUDA context")
        card = card_of(torch.device("cuda", self._device))
        code = compile_source(path, defines, card.target)
        self._module = _check(driver.cuModuleLoadData(code), f"Loading {path.name}")
        self._function = _check(
            driver.cuModuleGetFunction(self._module, name.encode()), f"Loading {path.name}"
        )
        attributes = driver.CUfunction_attribute
        static = attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        most = card.shared_bytes
        most -= _check(driver.cuFuncGetAttribute(static, self._function), f"{name}: shared memory")
        dynamic = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._function, dynamic, most), f"{name}: shared memory")
        self._driver = driver
        self._name = name
        self._attributes = [_dependent(driver)] if card.dependent_launch else []

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        pointers: Sequence[torch.Tensor],
        integers: Sequence[int],
    ) -> None:
        """Launch on the device's current stream.

        Where the card supports it, the kernel may start before its predecessor has ended. The calling thread
        may be one of autograd's, which has a current device but perhaps no context yet.
        """
        driver = self._driver
        with current(self._device):
            _check(driver.cuCtxSetCurrent(self._context), "Setting the CUDA context")
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = shared_bytes
            config.hStream = torch.cuda.current_stream().cuda_stream
            config.attrs = self._attributes
            config.numAttrs = len(self._attributes)
            values = tuple(p.data_ptr() for p in pointers) + tuple(integers)
            types = (ctypes.c_void_p,) * len(pointers) + (ctypes.c_int,) * len(integers)
            launched = driver.cuLaunchKernelEx(config, self._function, (values, types), 0)
            _check(launched, f"Launching {self._name}")


def _dependent(driver: Any) -> Any:
    """Return the launch attribute that lets a kernel start before its predecessor has ended."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute


@cache
def kernel(path: Path, name: str, defines: tuple[tuple[str, int], ...], device: int) -> Kernel:
    """Return the kernel with these compile-time parameters, compiled for a device on first use."""
    with current(device):
        return Kernel(path, name, dict(defines))
