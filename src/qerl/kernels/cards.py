"""GPU features that the kernels may use, by compute capability: the only place where generations differ.

A kernel has one source for all generations. A `Card` gives it switches (how weights are loaded from memory,
which instruction multiplies, whether a kernel may start before its predecessor has ended) and one size, the
shared memory of a block, which bounds the tiles. Code never tests a GPU's name, and a new GPU is one line of
`CARDS`. Names are there for people only: in the memory plan, and in the table of the docs.

`QERL_ARCH` treats a GPU as one of an older class: `QERL_ARCH=80` on any GPU of the table compiles for compute
capability 8.0, lets the driver translate that code, and uses no feature that 8.0 lacks. This runs the path of
one generation on another, and makes a GPU usable on which these kernels have not been run
(`qerl.kernels.needs`). Two things cannot be tested this way: speed on the real card, and the few instructions
that only its own generation has.
"""

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from qerl.errors import QeRLError

ARCH = "QERL_ARCH"
"""Environment variable: the compute capability, such as 80 or 120, as which every GPU is treated."""

Capability = tuple[int, int]
"""(major, minor)."""


@dataclass(frozen=True)
class Card:
    """Features of the GPUs of one compute capability.

    Attributes:
        capability: Compute capability.
        shared_bytes: Maximum shared memory of a block, static and dynamic together.
        loader: How weights reach shared memory: copies of 16 bytes by each thread, or the copy engine.
        math: Tensor-core instruction of packed_gemm.cu for more than 16 tokens: by one warp, or by four warps
            together.
        quack: Whether quack-kernels has NVFP4 products for this class.
        dependent_launch: Whether a kernel may start before its predecessor has ended.
        fp8: Whether the GPU converts to and from E4M3 and multiplies it, as FP8 keys, values and gradients
            need.
        native: Whether kernels are compiled for the GPU itself; else the driver translates PTX.
        unified: Whether GPU and CPU share one memory (`qerl.gpu_memory`).
        gpus: Well-known GPUs of this class by name, with the GiB of memory that a program sees.
    """

    capability: Capability
    shared_bytes: int
    loader: Literal["cp.async", "bulk"]
    math: Literal["mma.sync", "wgmma"] = "mma.sync"
    quack: bool = False
    dependent_launch: bool = True
    fp8: bool = True
    native: bool = True
    unified: bool = False
    gpus: tuple[tuple[str, float], ...] = ()

    @property
    def number(self) -> int:
        """The compute capability as compilers write it, such as 80 or 120."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def target(self) -> str:
        """NVRTC's target architecture. The letter gives access to a generation's own instructions, such as
        wgmma."""
        if not self.native:
            return f"compute_{self.number}"
        return f"sm_{self.number}{'a' if self.capability >= (9, 0) else ''}"


def _card(
    major: int,
    minor: int,
    kilobytes: int,
    gpus: dict[str, float],
    loader: Literal["cp.async", "bulk"] = "bulk",
    **more: Any,
) -> Card:
    return Card((major, minor), kilobytes * 1024, loader, gpus=tuple(gpus.items()), **more)


_AMPERE: dict[str, Any] = {"loader": "cp.async", "dependent_launch": False}

CARDS: dict[Capability, Card] = {
    card.capability: card
    for card in (
        _card(8, 0, 163, {"A100": 79.1, "A100 40GB": 39.4, "A30": 23.5}, fp8=False, **_AMPERE),
        _card(
            8, 6, 99, {"RTX 3090": 23.5, "A10": 22.0, "RTX A6000": 47.4, "A40": 44.3}, fp8=False, **_AMPERE
        ),
        _card(8, 7, 163, {"Jetson AGX Orin": 61.0}, fp8=False, unified=True, **_AMPERE),
        _card(8, 9, 99, {"RTX 4080": 15.5, "RTX 4090": 23.5, "L4": 22.0, "L40S": 44.3}, **_AMPERE),
        _card(9, 0, 227, {"H100": 79.1, "H200": 139.7}, math="wgmma", quack=True),
        _card(10, 0, 227, {"B200": 178.3}),
        _card(10, 3, 227, {"B300": 267.0}),
        _card(12, 0, 99, {"RTX 5080": 15.4, "RTX 5090": 31.3, "RTX PRO 6000": 94.9}, quack=True),
        _card(12, 1, 99, {"DGX Spark": 119.6}, unified=True),
    )
}
"""Every compute capability that the kernels are compiled for. Shared memory is from NVIDIA's table of compute
capabilities; a GPU that is present is queried for its own, as for its memory. GiB are as torch reports them,
with error correction where it is on as delivered; drivers differ by a tenth."""


@cache
def card_of(device: torch.device) -> Card:
    """Return the features that kernels may use on a device, with its own shared memory; cached per device.

    A CPU, on which Triton interprets, gets the class that `QERL_ARCH` names, else Hopper's.

    Raises:
        QeRLError: `QERL_ARCH` names no class, or a newer one than the GPU's; or the GPU is older than all
            classes.
    """
    if device.type != "cuda":
        return CARDS[asked() or (9, 0)]
    capability = torch.cuda.get_device_capability(device)
    properties: Any = torch.cuda.get_device_properties(device)
    return chosen(capability, properties.shared_memory_per_block_optin)


def chosen(capability: Capability, shared_bytes: int) -> Card:
    """Return the features that kernels may use on a GPU of this compute capability and shared memory.

    A GPU without a line of its own in `CARDS` gets the code of the newest class that is older.

    Raises:
        QeRLError: As :func:`card_of`.
    """
    as_class = asked() or capability
    if as_class > capability:
        raise QeRLError(
            f"{ARCH}={_number(as_class)} asks for a newer GPU than this one, which has compute capability "
            f"{words(capability)}; set a lower number, or remove {ARCH}."
        )
    if as_class < min(CARDS):
        raise QeRLError(
            f"The GPU has compute capability {words(capability)}, and {words(min(CARDS))} is needed."
        )
    card = CARDS[max(one for one in CARDS if one <= as_class)]
    card = replace(card, shared_bytes=min(card.shared_bytes, shared_bytes))
    # An older class's code runs on a newer GPU through the driver, which translates what all newer ones have.
    own = card.capability == capability
    return card if own else replace(card, math="mma.sync", quack=False, native=False)


def asked() -> Capability | None:
    """Return the class that `QERL_ARCH` names, or None if it is not set.

    Raises:
        QeRLError: `QERL_ARCH` names none of `CARDS`.
    """
    text = os.environ.get(ARCH, "")
    if not text:
        return None
    found = next((capability for capability in CARDS if str(_number(capability)) == text), None)
    if found is None:
        raise QeRLError(f"{ARCH} is {text!r}; set one of {', '.join(str(_number(one)) for one in CARDS)}.")
    return found


def why_no_fp8(card: Card) -> str:
    """Return why a card cannot use FP8, or an empty string if it can."""
    if card.fp8:
        return ""
    return f"FP8 needs compute capability 8.9, and this is {words(card.capability)}"


def words(capability: Capability) -> str:
    """Write a compute capability as NVIDIA does, such as 8.0."""
    return ".".join(map(str, capability))


def _number(capability: Capability) -> int:
    return 10 * capability[0] + capability[1]
