"""Requirements of the GPU kernels on a machine, checked without importing the packages."""

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch
from packaging.requirements import Requirement

from qerl.errors import QeRLError
from qerl.kernels.cards import ARCH, CARDS, Capability, Card, asked, chosen, why_no_fp8, words

RUN_ON: frozenset[Capability] = frozenset({(9, 0)})
"""Compute capabilities of the GPUs on which the kernels have been run."""

RUN_AS: frozenset[Capability] = frozenset({(8, 0)})
"""Older classes whose code has run all tests on one of those GPUs (`QERL_ARCH`). While this set is empty,
other cards are refused unless `QERL_ARCH` names a class for them; with an entry, no card since Ampere is
refused."""


@dataclass(frozen=True)
class Package:
    """A package that only some paths need.

    Attributes:
        name: Name for pip.
        module: Name to import.
        purpose: Its use, in words.
        required: Whether the kernels cannot run without it.
    """

    name: str
    module: str
    purpose: str
    required: bool = True


PACKAGES = (
    Package("triton", "triton", "GPU kernels of a decode step and of the update"),
    Package("cuda-bindings", "cuda.bindings", "GPU kernels compiled at run time"),
    Package("quack-kernels", "quack", "NVFP4 products of many tokens", required=False),
    Package("flash-attn-4", "flash_attn.cute", "attention of long rows on Hopper", required=False),
)
"""Packages that the kernels import."""


@dataclass(frozen=True)
class Obstacle:
    """A reason why the kernels do not run here.

    Attributes:
        reason: The reason, in words.
        remedy: Command that helps; empty if there is none.
    """

    reason: str
    remedy: str = ""


NO_CUDA = Obstacle("the model is not on a CUDA device")


def run_on(card: Card) -> str:
    """Return on which GPUs a class's code has been run, in words, or that it was only compiled.

    Two classes share their code if both load, multiply and launch in the same way, so that only tiles and FP8
    differ.
    """
    shown = " and ".join(map(words, sorted(RUN_ON)))
    if card.native and card.capability in RUN_ON:
        return "run on such GPUs"
    if card.capability in RUN_AS:
        return f"run on {shown}"
    alike = [words(one) for one in sorted(RUN_AS) if _code(CARDS[one]) == _code(card)]
    return f"compiled; that of {alike[0]} run on {shown}" if alike else "compiled"


def many_tokens_by(card: Card) -> str:
    """Name the method for products of four-bit weights with more tokens than packed_gemm.cu takes."""
    return "quack-kernels" if card.quack and has_module("quack") else "dequantisation and cuBLAS"


def card_sentence(card: Card) -> str:
    """Describe the code that a GPU of this class gets, in the sentence that a run prints at its start."""
    loads = "the copy engine" if card.loader == "bulk" else card.loader
    return (
        f"The kernels are those of compute capability {words(card.capability)} ({run_on(card)}): {loads} "
        f"and {card.math} for few tokens, {many_tokens_by(card)} for many."
    )


def _code(card: Card) -> tuple[str, str, bool]:
    return card.loader, card.math, card.dependent_launch


def obstacles(fp8: bool = False) -> list[Obstacle]:
    """Return the reasons why the kernels cannot run on the current CUDA device; empty if they can.

    Args:
        fp8: Whether keys and values are to be FP8.
    """
    found = obstacles_of_class(torch.cuda.get_device_capability(), fp8)
    found += [
        Obstacle(f"{package.name} is not installed", how_to_install(package.name))
        for package in PACKAGES
        if package.required and not has_module(package.module)
    ]
    return found


def obstacles_of_class(capability: Capability, fp8: bool = False) -> list[Obstacle]:
    """Return the reasons why the kernels cannot run on GPUs of a compute capability; empty if they can."""
    try:
        named, card = asked(), chosen(capability, 0)
    except QeRLError as error:
        return [Obstacle(str(error).rstrip(".").replace("The GPU", "the GPU", 1))]
    if named is None and capability not in RUN_ON and not RUN_AS:
        reason = (
            f"the GPU has compute capability {words(capability)}, for which the kernels were compiled but on "
            "which they were not run"
        )
        return [Obstacle(reason, f"export {ARCH}={card.number}")]
    return [Obstacle(why_no_fp8(card))] if fp8 and not card.fp8 else []


def has_module(module: str) -> bool:
    """Return True if a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


def how_to_install(package: str) -> str:
    """Return the pip command for a package, in the version that this project's extras require."""
    asked = [Requirement(text) for text in metadata.requires("qerl") or []]
    found = next((wanted for wanted in asked if wanted.name == package), Requirement(package))
    return f"pip install '{found.name}{found.specifier}'"
