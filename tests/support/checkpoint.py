"""A small model's folder, written tensor by tensor."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from qerl.fp4.checkpoint import INDEX_FILE, SINGLE_FILE
from qerl.fp4.format import NVFP4, PackedRows

HIDDEN, KV, MLP = 32, 16, 96
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
LAYER = "model.layers.0."


def plain_tensors(layers: int = 2) -> dict[str, torch.Tensor]:
    """Two decoder layers whose projections differ in magnitude, so that a shared scale is visible."""
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(11, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(layers):
        for i, (name, shape) in enumerate(SHAPES.items()):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape) * 10.0 ** (i % 3 - 2)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(HIDDEN)
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def write_plain(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A model folder; with several shards, neighbouring tensors are dealt to different ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": HIDDEN}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    if shards == 1:
        save_file(tensors, folder / SINGLE_FILE)
        return folder
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def packed_layer(tensors: dict[str, torch.Tensor], module: str, format=NVFP4) -> PackedRows:
    return PackedRows(
        tensors[f"{module}.weight_packed"],
        tensors[f"{module}.weight_scale"],
        tensors.get(f"{module}.weight_global_scale"),
        format,
    )


def nothing_but(folder: Path, *names: str) -> list[str]:
    """What else lies in a folder, hidden things included."""
    return [path.name for path in folder.iterdir() if path.name not in names]
