"""What the kernels may use on a GPU, by its compute capability: the one place where generations differ.

A kernel has one source for all of them. What it takes from here are switches (how weights come from memory,
which instruction multiplies, whether a kernel may start before the one ahead of it has ended) and a size, the
shared memory of a block, by which tiles are cut. So a card is never asked for its name, and another one is a
line of `CARDS`. Names are there for those who type or read them: of the memory plan, and of the docs' table.

`QERL_ARCH` treats a card as one of an older class: `QERL_ARCH=80` on any GPU of the table compiles for
compute capability 8.0, has the driver translate that, and leaves out what such a card lacks. That is how the
path of one generation is run on another, and how a card is used on which these kernels have not been run
(`qerl.kernels.needs`). What cannot be shown so are speed on the real card, and the few instructions that its
own generation alone has.
"""

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from qerl.errors import QeRLError

ARCH = "QERL_ARCH"
"""Environment variable: the compute capability, as 80 or 120, as which every GPU is treated."""

Capability = tuple[int, int]
"""(major, minor)."""


@dataclass(frozen=True)
class Card:
    """What GPUs of one compute capability offer.

    Attributes:
        capability: Compute capability.
        shared_bytes: Most shared memory of a block, static and dynamic together.
        loader: What brings weights to shared memory: copies of 16 bytes by each thread, or the copy engine.
        math: What multiplies many tokens with packed weights: a warp, or four warps at once.
        quack: Whether quack-kernels has NVFP4 products for it.
        dependent_launch: Whether a kernel may start before the one ahead of it has ended.
        fp8: Whether numbers are converted to and from E4M3 and multiplied, as FP8 keys, values and gradients
            need.
        native: Whether kernels are compiled for the GPU itself; else the driver translates them.
        unified: Whether GPU and CPU have one memory (`qerl.gpu_memory`).
        gpus: GiB that a program sees of well-known GPUs of this class, by name.
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
        """The compute capability as compilers write it, 80 or 120."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def target(self) -> str:
        """What NVRTC compiles for. The letter gives access to a generation's own instructions, as wgmma."""
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
"""Every compute capability that the kernels are compiled for. Shared memory as in NVIDIA's table of compute
capabilities; a GPU that is present is asked for its own, as it is for its memory. GiB are what torch reports,
with error correction where it is on as delivered; drivers differ by a tenth."""


@cache
def card_of(device: torch.device) -> Card:
    """What the kernels may use on a device, with its own shared memory; found once for each.

    For a CPU, on which Triton interprets, it is the class that `QERL_ARCH` names, else Hopper's.

    Raises:
        QeRLError: `QERL_ARCH` names no class, or a newer one than the GPU's; the GPU is older than all.
    """
    if device.type != "cuda":
        return CARDS[asked() or (9, 0)]
    capability = torch.cuda.get_device_capability(device)
    properties: Any = torch.cuda.get_device_properties(device)
    return chosen(capability, properties.shared_memory_per_block_optin)


def chosen(capability: Capability, shared_bytes: int) -> Card:
    """What the kernels may use on a GPU of this compute capability and shared memory.

    A GPU that is newer than a class, and has no line of its own, gets the code of the newest before it.

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
    """The class that `QERL_ARCH` names; None where it is not set.

    Raises:
        QeRLError: It names none of `CARDS`.
    """
    text = os.environ.get(ARCH, "")
    if not text:
        return None
    found = next((capability for capability in CARDS if str(_number(capability)) == text), None)
    if found is None:
        raise QeRLError(f"{ARCH} is {text!r}; set one of {', '.join(str(_number(one)) for one in CARDS)}.")
    return found


def why_no_fp8(card: Card) -> str:
    """Why nothing can be FP8 on a card; empty if it can."""
    if card.fp8:
        return ""
    return f"FP8 needs compute capability 8.9, and this is {words(card.capability)}"


def words(capability: Capability) -> str:
    """A compute capability as NVIDIA writes it, 8.0."""
    return ".".join(map(str, capability))


def _number(capability: Capability) -> int:
    return 10 * capability[0] + capability[1]
