"""Reading model folders: layouts, other tools' files, and damage that is named before any work."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qerl.errors import QeRLError
from qerl.fp4.checkpoint import INDEX_FILE, SINGLE_FILE, open_checkpoint
from qerl.fp4.format import BLOCK_FORMATS, NVFP4, PackedRows, dequantize
from qerl.fp4.groups import is_quantized
from qerl.fp4.quantize import quantize_checkpoint
from qerl.fp4.rounding import quantize
from tests.support.checkpoint import (
    LAYER,
    nothing_but,
    packed_layer,
    plain_tensors,
    write_plain,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_plain(tmp_path / "source", plain_tensors(), shards=3)


@pytest.mark.parametrize("format", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS.keys())
def test_compressed_tensors_reads_the_same_weights(tiny_model, tmp_path, format):
    model = tiny_model("llama", hidden_size=64, intermediate_size=96).bfloat16()
    model.save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "target", format.name)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    with torch.no_grad():
        theirs(torch.tensor([[1, 2, 3]]))  # the first forward pass decompresses
    ours = dict(open_checkpoint(tmp_path / "target").tensors())
    compared = 0
    for name, weight in theirs.named_parameters():
        module = name.removesuffix(".weight")
        if is_quantized(module) and module != name:
            expected = dequantize(packed_layer(ours, module, format), torch.bfloat16)
            assert torch.equal(weight.bfloat16(), expected)
            compared += 1
    assert compared == 7 * model.config.num_hidden_layers


def modelopt_folder(folder: Path, declared_in: str) -> tuple[Path, dict[str, PackedRows]]:
    """What ModelOpt writes of the plain tensors: W4A4, with a scale of the KV cache."""
    tensors, packed = {}, {}
    for name, tensor in plain_tensors().items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        packed[module] = quantize(tensor, NVFP4, "rtn")
        tensors[name] = packed[module].codes
        tensors[f"{module}.weight_scale"] = packed[module].scales
        tensors[f"{module}.weight_scale_2"] = (1 / packed[module].global_scale).squeeze()
        tensors[f"{module}.input_scale"] = torch.tensor(0.5)
    tensors[f"{LAYER}self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    write_plain(folder, tensors)
    declared = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    if declared_in == "config.json":
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "modelopt", **declared}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / declared_in).write_text(json.dumps({"quantization": declared}))
    return folder, packed


@pytest.mark.parametrize("declared_in", ["config.json", "hf_quant_config.json"])
def test_modelopt_is_read_under_the_names_of_compressed_tensors(tmp_path, declared_in):
    folder, packed = modelopt_folder(tmp_path / "modelopt", declared_in)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format is NVFP4
    tensors = dict(checkpoint.tensors())
    kinds = {name.rpartition(".")[2] for name in tensors}
    assert kinds == {"weight", "bias", "weight_packed", "weight_scale", "weight_global_scale"}
    for module, expected in packed.items():
        read = packed_layer(tensors, module)
        assert torch.equal(read.codes, expected.codes)
        torch.testing.assert_close(dequantize(read), dequantize(expected), rtol=2**-22, atol=0)


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "awq", "bits": 4},
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "transform_config": {"config_groups": {"u": {}}},
        },
    ],
)
def test_refuses_quantisation_it_cannot_read(source, declared):
    (source / "config.json").write_text(json.dumps({"quantization_config": declared}))
    with pytest.raises(QeRLError, match=f"quantised with {declared['quant_method']}"):
        _ = open_checkpoint(source).formats


def damage_no_config(source: Path) -> None:
    (source / "config.json").unlink()


def damage_config(source: Path) -> None:
    (source / "config.json").write_text('{"model_type": ')


def damage_shard_missing(source: Path) -> None:
    (source / "model-1.safetensors").unlink()


def damage_shard_truncated(source: Path) -> None:
    os.truncate(source / "model-1.safetensors", (source / "model-1.safetensors").stat().st_size - 1)


def damage_shard_is_a_pointer(source: Path) -> None:
    (source / "model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def damage_tensor_missing(source: Path) -> None:
    tensors = load_file(source / "model-0.safetensors")
    tensors.pop("model.embed_tokens.weight")
    save_file(tensors, source / "model-0.safetensors")


def damage_index(source: Path) -> None:
    (source / INDEX_FILE).write_text("{}")


def damage_index_leads_elsewhere(source: Path) -> None:
    shutil.copy(source / "model-0.safetensors", source.parent / "model-0.safetensors")
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../model-0.safetensors"}}))


def damage_only_pickles(source: Path) -> None:
    (source / INDEX_FILE).unlink()
    (source / "pytorch_model.bin").write_text("a pickle")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_no_config, r"config\.json cannot be read"),
        (damage_config, r"config\.json is not valid JSON"),
        (damage_shard_missing, r"lacks model-1\.safetensors"),
        (damage_shard_truncated, r"model-1\.safetensors is damaged or incomplete"),
        (damage_shard_is_a_pointer, r"model-1\.safetensors is damaged or incomplete"),
        (damage_tensor_missing, r"model-0\.safetensors lacks model\.embed_tokens\.weight"),
        (damage_index, "has no weight_map"),
        (damage_index_leads_elsewhere, r"lacks \.\./model-0\.safetensors"),
        (damage_only_pickles, "convert it to safetensors"),
    ],
)
def test_damaged_folder_is_named_before_any_work(source, tmp_path, damage, message):
    damage(source)
    with pytest.raises(QeRLError, match=message) as caught:
        quantize_checkpoint(source, tmp_path / "target")
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not nothing_but(tmp_path, "source", "model-0.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{LAYER}mlp.up_proj.weight", torch.randn(4, 24), "24 inputs, not a multiple of 16"),
        (f"{LAYER}mlp.up_proj.weight", torch.ones(4, 32, dtype=torch.int8), "is I8; it must be BF16"),
        (f"{LAYER}mlp.up_proj.weight", torch.full((4, 32), float("nan")), "has NaN or Inf"),
        ("model.embed_tokens.weight", torch.full((4, 32), float("inf")), "has NaN or Inf"),
    ],
)
def test_bad_tensor_is_named(tmp_path, name, tensor, message):
    source = write_plain(tmp_path / "source", plain_tensors() | {name: tensor})
    with pytest.raises(QeRLError, match=message) as caught:
        quantize_checkpoint(source, tmp_path / "target")
    assert name in str(caught.value)
    assert SINGLE_FILE in str(caught.value)
    assert not nothing_but(tmp_path, "source")


def test_unknown_family_is_refused(tmp_path):
    source = write_plain(tmp_path / "source", {"transformer.h.0.attn.c_attn.weight": torch.randn(32, 32)})
    with pytest.raises(QeRLError, match="model family is not supported"):
        quantize_checkpoint(source, tmp_path / "target")
