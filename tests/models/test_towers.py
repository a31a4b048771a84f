"""Text decoders of models for images: loaded from what is published, adapted, and saved for the wrapper."""

import json
import logging
import re
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from qerl.cli import main
from qerl.errors import QeRLError
from qerl.families.towers import decoder_name
from qerl.fp4.linear import PackedLinear
from qerl.fp4.quantize import quantize_checkpoint
from qerl.lora.adapter import add_lora, exchange_adapter, load_adapter
from qerl.models.decide import Choices, Source, decide
from qerl.models.fingerprint import check_base, checkpoint_fingerprint, fingerprint
from qerl.models.load import load_model, load_tokenizer
from qerl.noise.norms import find_noise_norms
from tests.support.models import make_tiny_tokenizer, move_adapter
from tests.support.wrappers import CAUSAL, WRAPPERS, make_wrapper, text_logits

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(folder, weights="bf16", **settings):
    return load_model(folder, weights, torch.float32, "cpu", **settings)


def ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 24))


def rename(folder, old: str, new: str) -> None:
    """The other naming of the same tensors."""
    file = folder / "model.safetensors"
    save_file({re.sub(old, new, name): t for name, t in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", WRAPPERS)
def test_the_text_decoder_computes_what_the_wrapper_does(tmp_path, caplog, family, tied):
    wrapper, texts = make_wrapper(family, tied), ids()
    wrapper.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "qerl"):
        model = load(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("qerl")]
    stored = load_file(tmp_path / "model.safetensors")
    others = sum(any(word in name for word in ("vis", "multi_modal")) for name in stored)
    assert (
        others
        and line
        == f"{tmp_path}: {others} tensors for images, sound or multi-token prediction are not loaded."
    )
    assert type(model).__name__ == CAUSAL[family]
    torch.testing.assert_close(text_logits(model, texts), text_logits(wrapper, texts), rtol=0, atol=1e-5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert checkpoint_fingerprint(tmp_path) == fingerprint(model.named_parameters())


def test_a_head_that_is_stored_counts_whatever_the_config_says(tmp_path):
    wrapper, texts = make_wrapper("Mistral3", tied=False), ids()
    wrapper.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    torch.testing.assert_close(
        text_logits(load(tmp_path), texts), text_logits(wrapper, texts), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("family", WRAPPERS)
def test_both_namings_are_read(tmp_path, family):
    make_wrapper(family, tied=False).save_pretrained(tmp_path)
    texts, before = ids(), load(tmp_path)
    if (names := list(load_file(tmp_path / "model.safetensors"))) and any(
        n.startswith("model.l") for n in names
    ):
        rename(
            tmp_path, r"^model\.(?:language_model\.)?(?=layers|norm|embed_tokens)", "language_model.model."
        )
        rename(tmp_path, r"^lm_head\.", "language_model.lm_head.")
    else:
        rename(tmp_path, r"^language_model\.model\.", "model.language_model.")
        rename(tmp_path, r"^language_model\.lm_head\.", "lm_head.")
    assert not set(names) & {n for n in load_file(tmp_path / "model.safetensors") if "language_model" in n}
    assert torch.equal(text_logits(load(tmp_path), texts), text_logits(before, texts))


@pytest.mark.parametrize("family", WRAPPERS)
def test_a_packed_wrapper_is_what_loading_packs(tmp_path, family):
    make_wrapper(family).save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "packed")
    texts, model = ids(), load(tmp_path / "plain", "nvfp4")
    packed = load(tmp_path / "packed", None)
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == (
        13 if family in ("Gemma4", "Qwen3_5") else 14
    )
    assert torch.equal(text_logits(packed, texts), text_logits(model, texts))
    assert len(find_noise_norms(packed)) == 4
    # What is written of the decoder is the causal LM alone.
    for source, weights in ((packed, "nvfp4"), (load(tmp_path / "plain"), "bf16")):
        source.save_pretrained(tmp_path / weights)
        assert json.loads((tmp_path / weights / "config.json").read_text())["architectures"] == [
            CAUSAL[family]
        ]
        again = load(tmp_path / weights, weights)
        assert type(again) is type(source)
        assert torch.equal(text_logits(again, texts), text_logits(source, texts))


@pytest.mark.parametrize("family", WRAPPERS)
def test_an_adapter_fits_the_wrapper_and_comes_back(tmp_path, family):
    wrapper, texts = make_wrapper(family), ids()
    wrapper.save_pretrained(tmp_path / "base")
    model = move_adapter(add_lora(load(tmp_path / "base"), rank=4, alpha=8, dropout=0.0))
    wanted = text_logits(model, texts)
    model.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        theirs = PeftModel.from_pretrained(wrapper, tmp_path / "adapter").eval()
    adapted = {name.partition(".lora_A")[0] for name, _ in theirs.named_parameters() if ".lora_A" in name}
    assert adapted and all(".model.language_model.layers." in name for name in adapted)
    torch.testing.assert_close(text_logits(theirs, texts), wanted, rtol=0, atol=1e-5)
    again = load_adapter(load(tmp_path / "base"), tmp_path / "adapter", trainable=True)
    assert torch.equal(text_logits(again, texts), wanted)
    # Saved again, exchanged, and read as a resumed run reads it.
    again.save_pretrained(tmp_path / "again", True, ["default"])
    again.save_pretrained(tmp_path / "again", is_main_process=False)  # as the other processes of a run
    folders = (tmp_path / "adapter", tmp_path / "again")
    first, second = (json.loads((folder / "adapter_config.json").read_text()) for folder in folders)
    assert first["target_modules"] == second["target_modules"]
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    for read in (exchange_adapter, lambda m, folder: m.load_adapter(folder, "default", is_trainable=True)):
        fresh = add_lora(load(tmp_path / "base"), rank=4, alpha=8, dropout=0.0)
        read(fresh, tmp_path / "adapter")
        assert torch.equal(text_logits(fresh, texts), wanted)


def test_an_adapter_that_peft_made_of_the_wrapper_is_read(tmp_path):
    wrapper, texts = make_wrapper("Gemma3"), ids()
    wrapper.save_pretrained(tmp_path / "base")
    pattern = r".*language_model.*layers\.1.*\.(q_proj|up_proj)"
    theirs = move_adapter(get_peft_model(wrapper, LoraConfig(r=4, target_modules=pattern))).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = load_adapter(load(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(text_logits(model, texts), text_logits(theirs, texts), rtol=0, atol=1e-5)


# The prefixes of vLLM's `hf_to_vllm_mapper` of these classes, and where its decoder lies.
TO_VLLM = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


@pytest.mark.parametrize("family", WRAPPERS)
def test_names_and_targets_of_adapters_are_those_that_vllm_parses(tmp_path, family):
    make_wrapper(family).save_pretrained(tmp_path / "base")
    add_lora(load(tmp_path / "base"), rank=4, alpha=8, dropout=0.0).save_pretrained(tmp_path / "adapter")
    for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"):
        assert name.startswith("base_model.model.")
        inner = name.removeprefix("base_model.model.")
        mapped = next(inner.replace(old, new, 1) for old, new in TO_VLLM.items() if inner.startswith(old))
        assert re.fullmatch(
            r"language_model\.model\.layers\.\d+\.(self_attn|linear_attn|mlp)\."
            r"(\w+_proj|in_proj_(qkv|z))\.lora_[AB]\.weight",
            mapped,
        )
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    # vLLM takes the ends from the last parenthesis of a pattern.
    assert {"q_proj", "down_proj"} <= set(re.search(r"\((.*?)\)\$?$", targets).group(1).split("|"))


def test_tokenizer_and_template_are_those_of_the_folder(tmp_path):
    make_wrapper("Mistral3").save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert "im_start" in tokenizer.chat_template


def test_a_config_and_tensors_that_do_not_fit_are_named(tmp_path):
    make_wrapper("Qwen3VL").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 96
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QeRLError, match=r"model\.layers\.0\.mlp\.down_proj\.weight has shape \[64, 128\]"):
        load(tmp_path)
    save_file({"tower.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(QeRLError, match=r"under names that are not known \(one is 'tower.weight'\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("language_model.model.layers.0.x", "model.layers.0.x"),
        ("model.language_model.layers.0.x", "model.layers.0.x"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", None),
        ("mtp.layers.0.mlp.up_proj.weight", None),
        ("model.vision_tower.encoder.layers.0.mlp.up_proj.weight", None),
    ],
)
def test_names(stored, own):
    assert decoder_name(stored) == own


@pytest.mark.slow
def test_a_run_on_a_wrapper_resumes_and_its_policy_is_loaded(tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    make_wrapper("Gemma3", max_position_embeddings=512).save_pretrained(base)
    make_tiny_tokenizer().save_pretrained(base)
    words = (
        f"train --task arithmetic --model {base} --output_dir {run} --use_cpu true --noise false --lora_r 4 "
        "--num_generations 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --save_steps 1 "
        "--max_completion_length 8"
    ).split()
    assert main([*words, "--max_steps", "1"]) == 0
    assert main([*words, "--max_steps", "2", "--resume_from_checkpoint", "true"]) == 0
    assert "weights: nvfp4" in (run / "config.yaml").read_text()
    assert all(".model.language_model." in name for name in load_file(run / "adapter_model.safetensors"))
    assert check_base(run, str(base)) == ""
    loading = decide(Source(str(base), run), Choices())
    again = load_adapter(loading.load(), run)
    assert again.peft_config["default"].target_modules == set(TARGETS)


def test_a_packed_wrapper_lists_what_stays_under_the_names_of_its_folder(tmp_path):
    make_wrapper("Gemma3", tied=False).save_pretrained(tmp_path / "plain")
    rename(tmp_path / "plain", r"^lm_head\.", "language_model.lm_head.")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "packed")
    ignored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "language_model.lm_head" in ignored
    assert any(name.startswith("vision_tower.") for name in ignored)
    packed = {name for name in load_file(tmp_path / "packed" / "model.safetensors") if "packed" in name}
    assert packed and all(name.startswith("language_model.model.layers.") for name in packed)
