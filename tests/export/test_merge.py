"""Merged models: the adapter's logits on its base, in transformers' own classes, and one sum rounded once."""

import json
import shutil

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from qerl import add_lora
from qerl.errors import QeRLError
from qerl.export import merge
from qerl.export.merge import write_merged
from qerl.families.towers import decoder_name
from qerl.fp4.checkpoint import open_checkpoint
from qerl.fp4.format import MXFP4, dequantize
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize
from qerl.models.load import load_model
from tests.models.test_published import DELTA, EXPERTS, QWEN36_27B, qwen36
from tests.support.models import TINY, make_tiny_model, move_adapter
from tests.support.published import fp8, write
from tests.support.wrappers import QWEN_SIGHT, make_wrapper, text_logits

IDS = torch.arange(3, 43).view(2, 20)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding once."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama in bfloat16, as models are published."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_model("llama").bfloat16().save_pretrained(folder)
    return folder


def merged(folder, out, weights, dtype=torch.bfloat16, targets=None, std=0.1):
    """The policy of a fresh adapter that has moved, and what was merged."""
    torch.manual_seed(0)
    model = load_model(folder, weights, torch.float32, "cpu")
    policy = move_adapter(add_lora(model, 4, 8, 0.0, targets), std)
    out.mkdir()
    with Progress(disable=True) as progress:
        done = write_merged(policy, open_checkpoint(folder), out, dtype, progress)
    return policy, done


def as_the_policy(policy, theirs, dtype=torch.bfloat16, mixture=False):
    """Checks that a model has the policy's logits, within a hundredth of their norm (float16: an eighth of
    that), of which the adapter moves them by a tenth and more; of mixtures at half of the tokens, since an
    expert that is chosen by a hair may be another one after rounding."""
    with torch.no_grad():
        ours = text_logits(policy, IDS)
        with policy.disable_adapter():
            bare = text_logits(policy, IDS)
    error = text_logits(theirs.float().eval(), IDS) - ours
    off = (error.norm(dim=-1) / ours.norm(dim=-1)).median() if mixture else error.norm() / ours.norm()
    moved = (bare - ours).norm() / ours.norm()
    assert moved > 0.1, f"the adapter moves the logits by {moved:.4f}, too little for this to tell"
    assert off < (1e-2 if dtype == torch.bfloat16 else 1e-2 / 8), f"off by {off:.4f}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "bf16"])
def test_the_logits_are_those_of_the_adapter_on_its_base(base, tmp_path, weights, dtype):
    policy, done = merged(base, tmp_path / "out", weights, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == dtype
    as_the_policy(policy, theirs, dtype)
    assert len(done.adapted) == 14


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_each_sum_is_rounded_once(base, tmp_path, weights):
    policy, _ = merged(base, tmp_path / "out", weights)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, layer in policy.get_base_model().named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        linear = layer.get_base_layer()
        w = linear.dense() if isinstance(linear, PackedLinear) else linear.weight
        a, b = (getattr(layer, of)["default"].weight.detach().double() for of in ("lora_A", "lora_B"))
        wanted = w.double() + 8 / 4 * b @ a
        off = (stored[f"{name}.weight"].double() - wanted).abs() / wanted.abs().clamp(min=1e-6)
        assert off.max() < UNIT[torch.bfloat16] * 1.001, name


def test_the_share_of_the_update_that_rounding_keeps(base, tmp_path):
    """Where the base is in bfloat16, additions below half a step are gone; float16 has smaller steps."""
    of_base, kept = load_file(base / "model.safetensors"), {}
    for dtype in UNIT:
        out = tmp_path / str(dtype)
        policy, done = merged(base, out, "bf16", dtype, std=3e-4)
        stored = load_file(out / "model.safetensors")
        added = wanted = 0.0
        for name, layer in policy.get_base_model().named_modules():
            if hasattr(layer, "lora_A"):
                a, b = (getattr(layer, of)["default"].weight.detach().double() for of in ("lora_A", "lora_B"))
                delta = 8 / 4 * b @ a
                change = stored[f"{name}.weight"].double() - of_base[f"{name}.weight"].double()
                added, wanted = added + (change * delta).sum(), wanted + delta.square().sum()
        kept[dtype] = done.kept
        assert done.kept == pytest.approx(float(added / wanted), rel=1e-3)
    assert kept[torch.bfloat16] < 0.8 < 0.9 < kept[torch.float16]


def test_files_fill_up_and_the_index_names_them(base, tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "SHARD_BYTES", 40_000)
    policy, _ = merged(base, tmp_path / "out", "nvfp4")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    as_the_policy(policy, AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_base_that_is_published_packed_becomes_whole(tmp_path, layout):
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if layout == "compressed-tensors":
        declared = {"quant_method": layout, "format": "nvfp4-pack-quantized"}
    held = lambda module: "nvfp4" if "_proj" in module else None  # noqa: E731
    write(tmp_path / "base", held, declared, layout, make_tiny_model("qwen3").bfloat16())
    policy, _ = merged(tmp_path / "base", tmp_path / "out", "nvfp4")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    as_the_policy(policy, AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))


@pytest.mark.parametrize("family", ["Gemma3", "Gemma4", "Mistral3", "Qwen3_5", "Qwen3VL"])
def test_a_model_for_images_stays_one(tmp_path, family):
    wrapper = make_wrapper(family)
    wrapper.bfloat16().save_pretrained(tmp_path / "base")
    policy, _ = merged(tmp_path / "base", tmp_path / "out", "nvfp4")
    theirs = type(wrapper).from_pretrained(tmp_path / "out", dtype="auto")
    as_the_policy(policy, theirs)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert before.keys() == after.keys()
    towers = [name for name in before if "vision" in name or "visual" in name]
    assert towers and all(torch.equal(before[name].bfloat16(), after[name].bfloat16()) for name in towers)


def test_nvidias_mixed_formats_with_a_packed_head_become_whole(tmp_path):
    """Qwen3.6 27B: MLPs and head in NVFP4, attention and delta nets in FP8. Weights are compared, since the
    logits of this tiny model move by more than a hundredth when all of its weights are rounded."""
    made = make_wrapper("Qwen3_5", tied=False).bfloat16()
    _, dense = write(tmp_path / "base", qwen36, QWEN36_27B, "modelopt", made)
    policy, done = merged(tmp_path / "base", tmp_path / "out", "as-published")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == made.state_dict().keys()
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for module, weight in dense.items():
        own = decoder_name(f"{module}.weight").removesuffix(".weight")
        layer, wanted = policy.get_base_model().get_submodule(own), weight.double()
        if own in done.adapted:
            a, b = (getattr(layer, of)["default"].weight.detach().double() for of in ("lora_A", "lora_B"))
            wanted = wanted + 8 / 4 * b @ a
        off = (stored[f"{module}.weight"].double() - wanted).abs() / wanted.abs().clamp(min=1e-6)
        assert off.max() < UNIT[torch.bfloat16] * 1.001, module
    assert len(dense) > len(done.adapted) > 6, "the head has no adapter"
    type(made).from_pretrained(tmp_path / "out", dtype="auto")


def test_merged_experts_of_another_layout_inside_of_a_wrapper(tmp_path):
    """Qwen3.6 35B-A3B in 16 bits: experts [E, outputs, inputs], gates in front of ups; a shared expert."""
    text = TINY | DELTA | EXPERTS | {"shared_expert_intermediate_size": 48}
    torch.manual_seed(1)
    made = transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(text_config=text, vision_config=QWEN_SIGHT)
    )
    made.bfloat16().save_pretrained(tmp_path / "base")
    targets = ["o_proj", "in_proj_qkv", "gate_proj", "up_proj", "down_proj"]
    policy, done = merged(tmp_path / "base", tmp_path / "out", "bf16", targets=targets)
    assert sum(".experts." in name for name in done.adapted) == 2 * 4 * 3
    theirs = type(made).from_pretrained(tmp_path / "out", dtype="auto")
    as_the_policy(policy, theirs, mixture=True)


def gpt_oss(folder, blocks):
    """A tiny gpt-oss with its experts merged, in 16 bits or as blocks of MXFP4 as it was published."""
    config = GptOssConfig(
        **TINY, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    GptOssForCausalLM(config).bfloat16().save_pretrained(folder)
    if not blocks:
        return
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        packed = [quantize(each.T.contiguous(), MXFP4, "rtn") for each in stored.pop(name)]
        codes = torch.stack([each.codes for each in packed])
        stored[f"{name}_blocks"] = codes.unflatten(2, (-1, 16))
        stored[f"{name}_scales"] = torch.stack([each.scales.view(torch.uint8) for each in packed])
        assert torch.isfinite(dequantize(packed[0])).all()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": declared}))


@pytest.mark.parametrize("blocks", [False, True])
def test_merged_experts_are_written_merged(tmp_path, blocks):
    gpt_oss(tmp_path / "base", blocks)
    targets = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    weights = "as-published" if blocks else "bf16"
    policy, done = merged(tmp_path / "base", tmp_path / "out", weights, targets=targets)
    assert len(done.adapted) == 2 * (2 + 4 * 2)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 64, 256)
    as_the_policy(policy, GptOssForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"), mixture=True)


def test_experts_by_name_and_a_layer_without(tmp_path):
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    }
    torch.manual_seed(1)
    made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TINY, **experts))
    made.bfloat16().save_pretrained(tmp_path / "base")
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    policy, done = merged(tmp_path / "base", tmp_path / "out", "nvfp4", targets=targets)
    assert len(done.adapted) == 2 * 2 + 4 * 2 + 2
    as_the_policy(policy, AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"), mixture=True)


def test_an_adapter_of_a_layer_without_a_matrix_of_its_own_is_refused(tmp_path):
    make_tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", "bf16", torch.float32, "cpu")
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    (tmp_path / "out").mkdir()
    with Progress(disable=True) as progress, pytest.raises(QeRLError, match="changes lm_head, which"):
        write_merged(policy, open_checkpoint(tmp_path / "base"), tmp_path / "out", torch.bfloat16, progress)


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_fp8_that_no_loaded_module_holds_is_dequantised(tmp_path, kind):
    """A head that predicts further tokens comes in FP8, too, and is not loaded; the result has no scales."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48]}
    declared = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip
    write(tmp_path / "base", lambda m: "fp8" if "_proj" in m else None, declared, fp8_kind=kind)
    file = tmp_path / "base" / "model.safetensors"
    codes, scale, wanted = fp8(torch.randn(64, 96), kind)
    name = "mtp.layers.0.self_attn.q_proj.weight"
    save_file(load_file(file) | {name: codes, f"{name}_scale": scale}, file, {"format": "pt"})
    merged(tmp_path / "base", tmp_path / "out", "as-published")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert not [name for name in stored if "scale" in name]
    assert torch.equal(stored[name], wanted.float().bfloat16())


def test_codes_that_cannot_be_dequantised_are_refused(tmp_path):
    """As the tower of a model for images may be packed, of which the text decoder alone is loaded."""
    made = make_wrapper("Qwen3_5", tied=False).bfloat16()
    write(tmp_path / "base", qwen36, QWEN36_27B, "modelopt", made)
    file = tmp_path / "base" / "model.safetensors"
    packed = {"model.visual.more.weight": torch.zeros(8, 8, dtype=torch.uint8)}
    save_file(load_file(file) | packed, file, {"format": "pt"})
    with pytest.raises(QeRLError, match=r"holds model\.visual\.more\.weight quantised"):
        merged(tmp_path / "base", tmp_path / "out", "as-published")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_number_beyond_float16_is_refused(base, tmp_path, name):
    shutil.copytree(base, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    stored[name][3, 5] = 1e5
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(QeRLError, match=r"has values up to 9.984e.04, above the maximum of torch.float16"):
        merged(tmp_path / "base", tmp_path / "out", "bf16", torch.float16)
    assert torch.isfinite(load_file(file)[name]).all()


def test_an_adapter_that_diverged_is_refused(base, tmp_path):
    policy = move_adapter(add_lora(load_model(base, "bf16", torch.float32, "cpu"), 4, 8, 0.0))
    policy.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight.data[1, 1] = torch.nan
    with (
        Progress(disable=True) as progress,
        pytest.raises(QeRLError, match="q_proj with its adapter has numbers"),
    ):
        (tmp_path / "out").mkdir()
        write_merged(policy, open_checkpoint(base), tmp_path / "out", torch.bfloat16, progress)
