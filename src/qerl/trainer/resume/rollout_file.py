"""Rollouts that later steps still use, kept with a checkpoint.

Sampled again after a resume they would come from another policy, and the resumed run would part from the
uninterrupted one.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qerl.errors import QeRLError
from qerl.trainer.batch import GROUP_KEY, Batch


def save_rollouts(parts: list[Batch], file: Path) -> None:
    """Write the parts of a rollout, one per microbatch."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{i}.{name}": value.clone(memory_format=torch.contiguous_format)
        for i, part in enumerate(parts)
        for name, value in part.items()
    }
    save_file(tensors, file)


def load_rollouts(file: Path, parts: int, device: torch.device) -> list[Batch]:
    """Read what `save_rollouts` wrote.

    Raises:
        QeRLError: The file does not say which samples share a prompt.
    """
    loaded: list[Batch] = [{} for _ in range(parts)]
    for key, value in load_file(file, device=str(device)).items():
        index, _, name = key.partition(".")
        loaded[int(index)][name] = value
    if any(GROUP_KEY not in part for part in loaded):
        raise QeRLError(
            f"{file} was written by QeRL 0.1 and does not say which samples share a prompt; resume with that "
            "version, or from a checkpoint without such a file."
        )
    return loaded
