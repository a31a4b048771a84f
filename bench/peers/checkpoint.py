"""Folders from which a peer loads a model of a given shape and an adapter, with zero or random weights.

Legend: N out, K in, R rank of LoRA.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from qerl.families.sizes import Sizes


def write_zeros(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint of BF16 zeros with the names and shapes of some tensors.

    The file is a header followed by a hole, so a model of 7B takes no disk space and no time to write. It is
    for a peer that requires a checkpoint but receives its weights in another way.

    Args:
        folder: Existing folder for `model.safetensors`.
        tensors: Tensors by name; only their shapes are read, so they may be on the meta device.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # content begins at a multiple of 8
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + end)


def write_adapter(folder: Path, sizes: Sizes, rank: int) -> list[str]:
    """Write a random BF16 LoRA adapter on all linears of each layer, in PEFT's format.

    Args:
        folder: Folder to create.
        sizes: The model's shape.
        rank: R; alpha is 2 R.

    Returns:
        The last parts of the linears' names, as in PEFT's `target_modules`.
    """
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for layer, spec in enumerate(sizes.specs):
        for linear in spec.linears:
            prefix = f"base_model.model.model.layers.{layer}.{linear.place}"
            a_RK = torch.randn(rank, linear.inputs, dtype=torch.bfloat16) * linear.inputs**-0.5
            b_NR = torch.randn(linear.outputs, rank, dtype=torch.bfloat16) * 0.01
            tensors |= {f"{prefix}.lora_A.weight": a_RK, f"{prefix}.lora_B.weight": b_NR}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = list(sizes.targets)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": targets,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return targets
