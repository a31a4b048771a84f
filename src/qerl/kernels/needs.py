"""What the GPU kernels need of a machine; looked up without importing any of it."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

CAPABILITY = (9, 0)
"""Compute capability: WGMMA came with Hopper and left with it."""

INSTALL = "pip install -e '.[gpu]'"
PACKAGES = {"triton": "triton", "cuda-bindings": "cuda.bindings", "quack-kernels": "quack"}
"""Packages by the name of the module that is imported."""


@dataclass(frozen=True)
class Obstacle:
    """Why the kernels do not run here.

    Attributes:
        reason: In words.
        remedy: Command that helps, empty where none does.
    """

    reason: str
    remedy: str = ""


def obstacles() -> list[Obstacle]:
    """What keeps the kernels from running on the present CUDA device; empty if nothing does."""
    found = []
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
        found.append(Obstacle(f"the GPU has compute capability {have}, and {need} is needed"))
    found += [
        Obstacle(f"{package} is not installed", INSTALL)
        for package, module in PACKAGES.items()
        if not has_module(module)
    ]
    return found


def has_module(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is not there
        return False
