"""What the GPU kernels need of a machine; looked up without importing any of it."""

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
"""Older classes whose code all tests have run on one of those GPUs (`QERL_ARCH`). As long as there is none,
the other cards are refused unless `QERL_ARCH` names a class for them; with one, no card since Ampere is."""


@dataclass(frozen=True)
class Package:
    """A package that only some paths need.

    Attributes:
        name: As pip knows it.
        module: As Python imports it.
        purpose: What it is for.
        required: Whether the kernels do not run without it.
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
"""What the kernels import."""


@dataclass(frozen=True)
class Obstacle:
    """Why the kernels do not run here.

    Attributes:
        reason: In words.
        remedy: Command that helps, empty where none does.
    """

    reason: str
    remedy: str = ""


NO_CUDA = Obstacle("the model is not on a CUDA device")


def run_on(card: Card) -> str:
    """On which GPUs the code of a class has been run, in words; other classes were compiled for.

    Code is that of another class where both load, multiply and launch in the same way, and only tiles and FP8
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
    """What multiplies more tokens with four-bit weights than this package's own product takes, in words."""
    return "quack-kernels" if card.quack and has_module("quack") else "dequantisation and cuBLAS"


def card_sentence(card: Card) -> str:
    """The code that a GPU of this class gets, as a run says it at its start."""
    loads = "the copy engine" if card.loader == "bulk" else card.loader
    return (
        f"The kernels are those of compute capability {words(card.capability)} ({run_on(card)}): {loads} "
        f"and {card.math} for few tokens, {many_tokens_by(card)} for many."
    )


def _code(card: Card) -> tuple[str, str, bool]:
    return card.loader, card.math, card.dependent_launch


def obstacles(fp8: bool = False) -> list[Obstacle]:
    """What keeps the kernels from running on the present CUDA device; empty if nothing does.

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
    """What keeps the kernels from running on GPUs of a compute capability; empty if nothing does."""
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
    """Whether a module could be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is not there
        return False


def how_to_install(package: str) -> str:
    """The command that installs a package in the version that one of this project's extras asks for."""
    asked = [Requirement(text) for text in metadata.requires("qerl") or []]
    found = next((wanted for wanted in asked if wanted.name == package), Requirement(package))
    return f"pip install '{found.name}{found.specifier}'"
