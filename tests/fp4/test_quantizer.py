"""Four-bit models through transformers: quantised while loading, saved, loaded back, and by others."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

from qerl.errors import QeRLError
from qerl.fp4.checkpoint import open_checkpoint
from qerl.fp4.format import NVFP4, dequantize
from qerl.fp4.linear import PackedLinear
from qerl.fp4.quantize import quantize_checkpoint
from qerl.fp4.quantizer import QeRLQuantizationConfig
from qerl.models.load import load_model

IDS = torch.arange(40).reshape(2, 20)


def load(folder: Path, weights="nvfp4", dtype=torch.float32, rounding="rtn"):
    return load_model(folder, weights, dtype, "cpu", rounding)


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture
def saved(tiny_model, tmp_path):
    """Folder of a plain checkpoint in several shards, q/k/v of a layer not all in one."""

    def save(family: str = "llama", dtype=torch.float32, **config) -> Path:
        folder = tmp_path / "plain"
        tiny_model(family, **config).to(dtype).save_pretrained(folder, max_shard_size="40KB")
        return folder

    return save


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_quantises_projections_and_nothing_else(saved, tiny_model, family: str) -> None:
    model, dense = load(saved(family)), tiny_model(family)
    layers = packed_layers(model)
    assert len(layers) == 2 * 7 and all(layer.format is NVFP4 for layer in layers.values())
    assert type(model.lm_head) is nn.Linear
    for name, value in dense.state_dict().items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(model.state_dict()[name], value)
    # What the layers compute is what a dense model with the dequantised weights computes.
    for name, layer in layers.items():
        dense.get_submodule(name).weight.data = dequantize(layer.storage.to_rows())
    assert torch.equal(logits(model), logits(dense))


def test_fused_layers_share_a_global_scale_across_shards(saved) -> None:
    folder = saved()
    shard_of = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    groups = [("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))]
    layers = packed_layers(load(folder))
    split = 0
    for i in range(2):
        for parent, names in groups:
            members = [f"model.layers.{i}.{parent}.{name}" for name in names]
            split += len({shard_of[f"{member}.weight"] for member in members}) > 1
            scales = {float(layers[member].weight_global_scale) for member in members}
            assert len(scales) == 1
            amax = max(
                load_file(folder / shard_of[f"{m}.weight"])[f"{m}.weight"].abs().max() for m in members
            )
            assert scales == {float(448 * 6 / amax)}
    assert split, "no group lies in two shards; the test tests nothing"


@pytest.mark.parametrize(("weights", "rounding"), [("nvfp4", "rtn"), ("nvfp4", "mse"), ("mxfp4", "rtn")])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_same_bytes_as_qerl_quantize(saved, tmp_path, weights: str, rounding: str, stored) -> None:
    folder = saved(dtype=stored)
    quantize_checkpoint(folder, tmp_path / "packed", weights, rounding)
    expected = dict(open_checkpoint(tmp_path / "packed").tensors())
    # In a bf16 model too: the weights are quantised as they are stored, not as the model would hold them.
    state = load(folder, weights, torch.bfloat16, rounding).state_dict()
    names = [name for name in expected if "_proj." in name]
    assert names and set(state) == set(expected)
    for name in names:
        assert state[name].dtype == expected[name].dtype
        assert torch.equal(state[name].view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_save_and_load_round_trip(saved, tmp_path, family: str, weights: str) -> None:
    model = load(saved(family), weights)
    model.save_pretrained(tmp_path / "packed")
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert checkpoint.quantization["quant_method"] == "compressed-tensors"
    assert checkpoint.format.name == weights
    assert checkpoint.config["quantization_config"]["ignore"] == ["lm_head"]
    again = load(tmp_path / "packed", weights)
    assert torch.equal(logits(again), logits(model))
    assert len(packed_layers(again)) == 14, "decompressed by a forward pass"
    again.save_pretrained(tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "again"))
    assert set(first) == set(second)
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


@pytest.mark.filterwarnings("ignore:You passed")
def test_compressed_tensors_reads_what_was_saved(saved, tmp_path) -> None:
    model = load(saved("qwen2"))
    model.save_pretrained(tmp_path / "packed")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    for name, layer in packed_layers(model).items():
        weight = theirs.get_submodule(name).weight  # computed in BF16, whatever is asked for
        assert torch.equal(weight.bfloat16(), layer.dense(torch.bfloat16))
        if layer.bias is not None:
            assert torch.equal(theirs.get_submodule(name).bias, layer.bias)


def test_modelopt_checkpoint(saved, tmp_path) -> None:
    model = load(saved())
    model.save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith("global_scale"):
            module = name.removesuffix(".weight_global_scale")
            tensors[f"{module}.weight_scale_2"] = (1 / tensor).reshape(())
            tensors[f"{module}.input_scale"] = torch.tensor(1.0)
        else:
            tensors[name.replace("weight_packed", "weight")] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    config_file = tmp_path / "packed" / "config.json"
    config = json.loads(config_file.read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    config_file.write_text(json.dumps(config))
    again = load(tmp_path / "packed")
    assert len(packed_layers(again)) == 14
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    again.save_pretrained(tmp_path / "again")
    assert open_checkpoint(tmp_path / "again").quantization["quant_method"] == "compressed-tensors"


def test_cast_and_trainer_facing_attributes(saved) -> None:
    model = load(saved("qwen2"))
    scales = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("scale")}
    model.to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    for name, buffer in model.named_buffers():
        if name in scales:
            assert buffer.dtype == scales[name].dtype and torch.equal(buffer.float(), scales[name].float())
    assert model.is_quantized and model.hf_quantizer.is_trainable


def edit(folder: Path, name: str, change) -> None:
    """Rewrite the shard that holds a tensor; ``change`` returns its new value, None deletes it."""
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    new = change(tensors.pop(name))
    if new is None:
        del index["weight_map"][name]
        index_file.write_text(json.dumps(index))
    else:
        tensors[name] = new
    save_file(tensors, file, metadata={"format": "pt"})


NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_name_the_layer(saved, bad: float) -> None:
    folder = saved()
    edit(folder, NAME, lambda weight: weight.index_fill(1, torch.tensor([3]), bad))
    with pytest.raises(QeRLError, match=r"model\.layers\.1\.self_attn\.k_proj: .*NaN or Inf"):
        load(folder)


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
@pytest.mark.parametrize("name", [NAME, "model.norm.weight"])
def test_missing_tensor(saved, weights: str, name: str) -> None:
    folder = saved()
    edit(folder, name, lambda weight: None)
    with pytest.raises(QeRLError, match=f"lacks {name}|no tensor {name}"):
        load(folder, weights)


def test_tensors_that_come_from_no_file_cannot_be_quantised(tiny_model) -> None:
    model = tiny_model()
    with pytest.raises(QeRLError, match="_proj: no tensor of its own in a safetensors file"):
        type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            quantization_config=QeRLQuantizationConfig(),
        )


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
@pytest.mark.parametrize("name", [NAME, "model.norm.weight"])
def test_wrong_shape(saved, weights: str, name: str) -> None:
    folder = saved()
    edit(folder, name, lambda weight: torch.cat([weight, weight]))
    with pytest.raises(QeRLError, match=r"k_proj.* shape \[64, 64\]|norm.* shape \[128\]"):
        load(folder, weights)


def test_wrong_shape_in_a_packed_checkpoint(saved, tmp_path) -> None:
    load(saved()).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_packed"
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(QeRLError, match=rf"{name} has shape \[127, 32\] .* \[128, 32\]"):
        load(tmp_path / "packed")


def test_missing_part_of_a_packed_layer(saved, tmp_path) -> None:
    load(saved()).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_global_scale"
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(QeRLError, match=f"lacks {name}"):
        load(tmp_path / "packed")


def test_truncated_and_missing_shards(saved) -> None:
    folder = saved()
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(QeRLError, match=shard.name):
        load(folder)
    shard.unlink()
    with pytest.raises(QeRLError, match=shard.name):
        load(folder)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_layers_of_a_width_that_no_blocks_divide_stay_as_they_are(saved, tmp_path, caplog, weights) -> None:
    folder = saved(intermediate_size=104)
    model = load(folder, weights)
    assert "2 of 14 layers stay unquantised" in caplog.text and "down_proj has 104 inputs" in caplog.text
    layers, narrow = packed_layers(model), "model.layers.0.mlp.down_proj"
    assert len(layers) == 12 and narrow not in layers
    (stored,) = (held[key] for shard in folder.glob("*.safetensors") for held in [load_file(shard)]
                 for key in held if key == f"{narrow}.weight")  # fmt: skip
    assert model.get_submodule(narrow).weight.equal(stored)
    model.save_pretrained(tmp_path / "packed")
    assert logits(load(tmp_path / "packed", weights)).equal(logits(model))
    with pytest.raises(
        QeRLError, match=r"inputs, not a multiple of .*, and no other layer fits either; load .*: bf16"
    ):
        load(saved(hidden_size=40, intermediate_size=104, num_attention_heads=5, head_dim=8), weights)


def test_unknown_format_and_method() -> None:
    with pytest.raises(QeRLError, match="fp3; choose one of nvfp4, mxfp4"):
        QeRLQuantizationConfig("fp3")
    with pytest.raises(QeRLError, match="round; choose one of rtn, mse"):
        QeRLQuantizationConfig("nvfp4", "round")


def test_unsupported_families(tmp_path) -> None:
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(QeRLError, match="GPT2LMHeadModel has no decoder layers"):
        load(tmp_path / "gpt2")


def test_what_a_family_keeps_in_fp32_is_as_before_once_a_model_is_loaded(saved) -> None:
    assert load(saved(), dtype=torch.bfloat16)._keep_in_fp32_modules_strict == set()
