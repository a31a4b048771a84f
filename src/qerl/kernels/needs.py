"""What the GPU kernels need of a machine; looked up without importing any of it."""

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch
from packaging.requirements import Requirement

CAPABILITY = (9, 0)
"""Compute capability: WGMMA came with Hopper and left with it."""


@dataclass(frozen=True)
class Package:
    """A package that only some paths need.

    Attributes:
        name: As pip knows it.
        module: As Python imports it.
        purpose: What it is for.
    """

    name: str
    module: str
    purpose: str


PACKAGES = (
    Package("triton", "triton", "GPU kernels of a decode step and of the update"),
    Package("cuda-bindings", "cuda.bindings", "GPU kernels compiled at run time"),
    Package("quack-kernels", "quack", "NVFP4 products of many tokens"),
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


def obstacles() -> list[Obstacle]:
    """What keeps the kernels from running on the present CUDA device; empty if nothing does."""
    found = []
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
        found.append(Obstacle(f"the GPU has compute capability {have}, and {need} is needed"))
    found += [
        Obstacle(f"{package.name} is not installed", how_to_install(package.name))
        for package in PACKAGES
        if not has_module(package.module)
    ]
    return found


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
