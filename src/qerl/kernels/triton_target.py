"""Compilation of Triton kernels for an older class of GPUs, where `QERL_ARCH` names one.

Triton has a setting for the class that it lowers for, which selects tensor cores, FP8 types and the
pipelining of loads; but it still writes PTX for the GPU's own generation. Here the PTX is for the older class
too, so that any feature such a card lacks is an error, and it is assembled for the GPU that is present.
"""

from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from qerl.kernels.cards import Capability, asked


def compile_as(capability: Capability) -> None:
    """Make Triton compile for this compute capability, and assemble for the GPU that is present."""
    number = 10 * capability[0] + capability[1]
    knobs.runtime.override_arch = f"sm{number}"
    write = CUDABackend.make_ptx

    def write_for_class(self: CUDABackend, src: str, metadata: Any, options: Any, _: int) -> str:
        ptx: str = write(self, src, metadata, options, number)
        return ptx

    CUDABackend.make_ptx = write_for_class


def follow_environment() -> None:
    """Call `compile_as` for the class that `QERL_ARCH` names; do nothing if it is not set.

    Raises:
        QeRLError: `QERL_ARCH` names no class.
    """
    capability = asked()
    if capability is not None and knobs.runtime.override_arch is None:
        compile_as(capability)
