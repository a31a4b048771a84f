"""Folders that are quantised as published: several formats in one model, by what headers and configs say."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qerl.errors import QeRLError
from qerl.fp4.checkpoint import open_checkpoint
from qerl.fp4.format import NVFP4
from qerl.fp4.linear import PackedLinear
from qerl.fp4.published import block_shape, choose_weights, declared_format, dequantize_fp8
from qerl.fp4.rounding import quantize
from qerl.models.decide import Choices, Source, decide
from qerl.models.fingerprint import checkpoint_fingerprint, linears_fingerprint
from qerl.models.load import check_model, load_model
from tests.support.published import fp8, write

IDS = torch.arange(3, 43).reshape(2, 20)


def load(folder, weights=None, dtype=torch.float32, **settings):
    return load_model(folder, weights, dtype, "cpu", **settings)


def packed_in(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def replaced(model: nn.Module, dense: dict[str, torch.Tensor]) -> nn.Module:
    """The dense model with the weights that the folder stands for."""
    for module, weight in dense.items():
        model.get_submodule(module).weight.data = weight.to(torch.float32)
    return model


def mixed(module: str) -> str | None:
    """As NVIDIA publishes Qwen3.6: MLP and head in NVFP4, attention in FP8 but for one matrix."""
    if ".mlp." in module or module == "lm_head":
        return "nvfp4"
    return "fp8" if "self_attn" in module and not module.endswith("k_proj") else None


LAYERS = [f"model.layers.{i}.{place}" for i in range(2) for place in (
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
)]  # fmt: skip
ALGORITHMS = {"nvfp4": "W4A16_NVFP4", "fp8": "FP8"}
FOUR_BITS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
EIGHT_BITS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
MIXED_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["mtp*"],
    "config_groups": {  # they claim activations in four bits, the layers say otherwise
        "group_0": {"input_activations": EIGHT_BITS, "weights": EIGHT_BITS, "targets": ["Linear"]},
        "group_1": {"input_activations": FOUR_BITS, "weights": FOUR_BITS, "targets": ["Linear"]},
    },
    "quantized_layers": {
        module.replace("model.", "model.language_model."): {"quant_algo": ALGORITHMS[held], "group_size": 16}
        for module in [*LAYERS, "lm_head"]
        if (held := mixed(module))
    },
}
MIXED_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["re:.*k_proj", "re:visual.*"],
    "config_groups": {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": EIGHT_BITS, "format": "float-quantized"},
        "group_1": {"targets": ["Linear"], "weights": FOUR_BITS, "format": "nvfp4-pack-quantized"},
    },
}


@pytest.mark.parametrize(
    ("layout", "declared"), [("modelopt", MIXED_MODELOPT), ("compressed-tensors", MIXED_COMPRESSED)]
)
def test_three_formats_in_one_model_as_published(tmp_path, caplog, layout, declared):
    model, dense = write(tmp_path, mixed, declared, layout)
    stored = load_file(tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "qerl"):
        loaded = load(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("qerl")]
    size = 2 * sum(stored[f"{m}.weight"].numel() for m in LAYERS if mixed(m) == "fp8") / 1e6
    assert (
        line == f"{tmp_path}: the nvfp4 head is converted to 16 bits; 6 FP8 layers are converted to 16 bits "
        f"({size:.1f} MB)."
    )
    assert packed_in(loaded) == {module for module in LAYERS if ".mlp." in module}
    for module in packed_in(loaded):
        codes = stored[f"{module}.weight" if layout == "modelopt" else f"{module}.weight_packed"]
        assert torch.equal(loaded.get_submodule(module).weight_packed, codes)
        assert torch.equal(loaded.get_submodule(module).weight_scale, stored[f"{module}.weight_scale"])
    wanted = replaced(model, dense)(IDS).logits
    torch.testing.assert_close(loaded(IDS).logits, wanted, rtol=0, atol=1e-4)
    for module in LAYERS:
        assert declared_format(declared, module) == (mixed(module) or "bf16")
    assert check_model(tmp_path, None) == "as-published"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_packs_what_is_not_packed_yet(tmp_path, dtype):
    _, dense = write(tmp_path, mixed, MIXED_MODELOPT, "modelopt")
    stored = load_file(tmp_path / "model.safetensors")
    loaded = load(tmp_path, "nvfp4", dtype)
    assert packed_in(loaded) == set(LAYERS)
    for module in LAYERS:
        layer = loaded.get_submodule(module)
        if ".mlp." in module:
            assert torch.equal(layer.weight_packed, stored[f"{module}.weight"])
            continue
        group = [module] if "o_proj" in module else [module.replace(module[-6], n) for n in "qkv"]
        weights = {m: dense.get(m, stored[f"{m}.weight"]).float() for m in group}
        amax = max(float(weight.abs().max()) for weight in weights.values())
        expected = quantize(weights[module], NVFP4, "mse", amax)
        assert torch.equal(layer.weight_packed, expected.codes)
        assert torch.equal(layer.weight_global_scale, expected.global_scale)
    # What is saved of it has one format, and is loaded back in it.
    loaded.save_pretrained(tmp_path / "saved")
    assert check_model(tmp_path / "saved", None) == "nvfp4"
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "saved", dtype=dtype)(IDS).logits, loaded(IDS).logits)


def test_what_is_saved_of_a_model_as_published_comes_back(tmp_path):
    write(tmp_path, mixed, MIXED_COMPRESSED)
    loaded = load(tmp_path)
    loaded.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert packed_in(again) == packed_in(loaded)
    assert torch.equal(again(IDS).logits, loaded(IDS).logits)
    for module in LAYERS:
        declared = open_checkpoint(tmp_path / "saved").quantization
        assert declared_format(declared, module) == ("nvfp4" if ".mlp." in module else "bf16")


ALL_FP8 = {
    "fp8 by block": ("block", "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [32, 48]}),
    "fp8 by tensor": ("tensor", "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": None}),
    "modelopt": ("tensor", "weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "compressed by tensor": (
        "tensor", "weight_scale",
        {"quant_method": "compressed-tensors", "format": "float-quantized",
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": EIGHT_BITS}}, "ignore": ["lm_head"]},
    ),
    "compressed by channel": (
        "channel", "weight_scale",
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
    ),
    "compressed by block": (
        "block", "weight_scale",
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
         "config_groups": {"group_0": {"weights": EIGHT_BITS | {"block_structure": [32, 48]}}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALL_FP8)
def test_fp8_becomes_16_bits(tmp_path, kind):
    scales, name, declared = ALL_FP8[kind]
    held = lambda module: "fp8" if "_proj" in module else None  # noqa: E731
    model, dense = write(tmp_path, held, declared, scale=name, fp8_kind=scales)
    loaded = load(tmp_path)
    assert check_model(tmp_path, None) == "as-published"
    assert not packed_in(loaded) and not hasattr(loaded.config, "quantization_config")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for module, weight in dense.items():
        torch.testing.assert_close(loaded.get_submodule(module).weight.double(), weight, rtol=1e-6, atol=0)
    wanted = replaced(model, dense)(IDS).logits
    torch.testing.assert_close(loaded(IDS).logits, wanted, rtol=0, atol=1e-4)
    assert torch.equal(load(tmp_path, "bf16")(IDS).logits, loaded(IDS).logits)
    rounded = load(tmp_path, dtype=torch.bfloat16).model.layers[0].mlp.up_proj.weight
    assert torch.equal(rounded, dense["model.layers.0.mlp.up_proj"].float().bfloat16())
    loaded.save_pretrained(tmp_path / "plain")
    assert torch.equal(load(tmp_path / "plain", "bf16")(IDS).logits, loaded(IDS).logits)
    packed = load(tmp_path, "mxfp4")
    assert packed_in(packed) == set(LAYERS)
    assert all(declared_format(declared, module) == "fp8" for module in LAYERS)
    assert declared_format(declared, "lm_head") == "bf16" or "ignore" not in declared


@pytest.mark.parametrize("shape", [(64, 96), (33, 50), (16, 2048), (1, 48)])
def test_scales_of_fp8(shape):
    weight = torch.randn(shape) * torch.exp2(torch.randint(-6, 6, (shape[0], 1)).float())
    for kind in ("tensor", "channel", "block"):
        codes, scale, wanted = fp8(weight, kind)
        assert torch.equal(dequantize_fp8(codes, scale, (32, 48)), wanted.float())
    with pytest.raises(QeRLError, match=r"its scales have shape \[5, 7\]"):
        dequantize_fp8(codes, torch.ones(5, 7), (32, 48))


def test_scales_that_do_not_fit_are_named(tmp_path):
    write(tmp_path, mixed, MIXED_COMPRESSED)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.self_attn.o_proj.weight_scale": torch.ones(3, 5)}, file)
    with pytest.raises(QeRLError, match=r"layers\.1\.self_attn\.o_proj: its scales have shape \[3, 5\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mlp.up_proj.qweight", torch.zeros(2, 2).int(), r"mlp\.up_proj in a format .*qweight is I32"),
        ("mlp.up_proj.pre_quant_scale", torch.ones(4), r"mlp\.up_proj in a format .*pre_quant_scale is F32"),
        ("mlp.up_proj.weight", torch.zeros(128, 64, dtype=torch.int8), r"mlp\.up_proj in a .*weight is I8"),
    ],
)  # fmt: skip
def test_a_layer_in_another_format_is_named_before_anything_is_loaded(tmp_path, name, tensor, message):
    held = lambda module: "fp8" if "self_attn" in module else None  # noqa: E731
    write(tmp_path, held, MIXED_COMPRESSED)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.0.{name}": tensor}, file)
    with pytest.raises(QeRLError, match=message):
        check_model(tmp_path, None)


@pytest.mark.parametrize(
    "damaged",
    [{"config_groups": [1]}, {"config_groups": {"a": 3}}, {"ignore": 5}, {"quantized_layers": {"m": 1}}],
)
def test_a_damaged_description_is_a_sentence(tmp_path, damaged):
    write(tmp_path, mixed, MIXED_MODELOPT | damaged, "modelopt")
    if "quantized_layers" not in damaged:
        config = json.loads((tmp_path / "config.json").read_text())
        del config["quantization_config"]["quantized_layers"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QeRLError, match="has a quantization_config that is not valid"):
        check_model(tmp_path, None)


def test_the_choice_of_a_format():
    assert choose_weights("m", [], None) == "nvfp4"
    assert choose_weights("m", ["nvfp4"] * 3, None) == "nvfp4"
    assert choose_weights("m", ["mxfp4"], None) == "mxfp4"
    for held in (["nvfp4", "bf16"], ["nvfp4", "fp8"], ["fp8"], ["fp8", "bf16"]):
        assert choose_weights("m", held, None) == "as-published"
        assert choose_weights("m", held, "nvfp4") == "nvfp4"
    assert choose_weights("m", ["fp8"], "bf16") == "bf16"
    for held, wanted, message in (
        ([], "as-published", "published in 16 bits"),
        (["nvfp4", "fp8"], "bf16", "holds nvfp4 weights, which cannot become bf16"),
        (["nvfp4", "fp8"], "mxfp4", "cannot become mxfp4"),
        (["fp8"], "nf4", "holds FP8 weights, which bitsandbytes cannot convert to nf4"),
        (["nvfp4", "mxfp4"], None, "holds both nvfp4 and mxfp4 weights"),
    ):
        with pytest.raises(QeRLError, match=message):
            choose_weights("m", held, wanted)


def test_a_folder_decides_where_nobody_does(tmp_path):
    write(tmp_path / "mixed", mixed, MIXED_COMPRESSED)
    loading = decide(Source(str(tmp_path / "mixed")), Choices())
    assert (loading.weights, loading.rounding) == ("as-published", None)
    loading = decide(Source(str(tmp_path / "mixed"), weights="nvfp4"), Choices())
    assert (loading.weights, loading.rounding) == ("nvfp4", "mse")
    assert linears_fingerprint(tmp_path / "mixed") is None
    assert checkpoint_fingerprint(tmp_path / "mixed") is not None


def test_blocks():
    assert block_shape(None) == (128, 128)
    assert block_shape({"weight_block_size": [64, 32]}) == (64, 32)
