"""Triton kernels as an older class of GPUs would get them, where `QERL_ARCH` names one.

Triton has a setting for the class that it compiles for, but then assembles machine code of that class as
well, which runs on no other. Its PTX does run on every newer GPU, so here it is assembled for the GPU itself:
instructions, FP8 types and the pipelining of loads are the older class's.
"""

from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from qerl.kernels.cards import Capability, asked


def compile_as(capability: Capability) -> None:
    """Makes Triton compile for this compute capability, and assemble for the GPU that is there."""
    number = 10 * capability[0] + capability[1]
    knobs.runtime.override_arch = f"sm{number}"
    assemble = CUDABackend.make_cubin

    def assemble_for_gpu(self: CUDABackend, src: str, metadata: Any, options: Any, _: int) -> bytes:
        code: bytes = assemble(self, src, metadata, options, self.target.arch)
        return code

    CUDABackend.make_cubin = assemble_for_gpu


def follow_environment() -> None:
    """Does so for the class that `QERL_ARCH` names; nothing where it is not set.

    Raises:
        QeRLError: It names no class.
    """
    capability = asked()
    if capability is not None and knobs.runtime.override_arch is None:
        compile_as(capability)
