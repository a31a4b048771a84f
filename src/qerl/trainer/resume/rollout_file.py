"""Rollouts that later steps still use, kept with a checkpoint.

Sampled again after a resume they would come from another policy, and the resumed run would part from the
uninterrupted one.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Batch = dict[str, torch.Tensor]


def save_rollouts(parts: list[Batch], file: Path) -> None:
    """Write the parts of a rollout, one for each microbatch."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{i}.{name}": value.clone(memory_format=torch.contiguous_format)
        for i, part in enumerate(parts)
        for name, value in part.items()
    }
    save_file(tensors, file)


def load_rollouts(file: Path, parts: int, device: torch.device) -> list[Batch]:
    """Read what `save_rollouts` wrote."""
    loaded: list[Batch] = [{} for _ in range(parts)]
    for key, value in load_file(file, device=str(device)).items():
        index, _, name = key.partition(".")
        loaded[int(index)][name] = value
    return loaded
