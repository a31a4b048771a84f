"""What the GPU kernels need of a machine; looked up without importing any of it."""

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch
from packaging.requirements import Requirement

from qerl.errors import QeRLError
from qerl.kernels.cards import ARCH, CARDS, Capability, asked, chosen, why_no_fp8, words

RUN_ON: frozenset[Capability] = frozenset({(9, 0)})
"""Compute capabilities on which the kernels have been run. For the others of `CARDS` they were compiled
alone, so such a GPU is refused unless `QERL_ARCH` names a class for it; ``frozenset(CARDS)`` opens all."""


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


def obstacles(fp8: bool = False) -> list[Obstacle]:
    """What keeps the kernels from running on the present CUDA device; empty if nothing does.

    Args:
        fp8: Whether keys and values are to be FP8.
    """
    found = _obstacles_of_card(torch.cuda.get_device_capability(), fp8)
    found += [
        Obstacle(f"{package.name} is not installed", how_to_install(package.name))
        for package in PACKAGES
        if package.required and not has_module(package.module)
    ]
    return found


def _obstacles_of_card(capability: Capability, fp8: bool) -> list[Obstacle]:
    have = f"the GPU has compute capability {words(capability)}"
    if capability < min(CARDS):
        return [Obstacle(f"{have}, and {words(min(CARDS))} is needed")]
    try:
        named, card = asked(), chosen(capability, 0)
    except QeRLError as error:
        return [Obstacle(str(error).rstrip("."))]
    if named is None and capability not in RUN_ON:
        remedy = f"export {ARCH}={card.number}"
        return [
            Obstacle(f"{have}, for which the kernels were compiled but on which they were not run", remedy)
        ]
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
