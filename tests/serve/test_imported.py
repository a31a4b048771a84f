"""Adapters from elsewhere: on a server they compute what PEFT computes, and training goes on from them."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from qerl.errors import QeRLError
from qerl_serve.imported import read_imported, save_imported
from tests.serve.test_checkpoints import train
from tests.support.models import make_tiny_model
from tests.support.serve import request, sampled, small_model, tiny_backend, weights

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
PROMPT = [5, 9, 77, 31]


def made(folder, targets=ATTENTION + MLP, **options):
    """An adapter of PEFT with numbers in B, saved."""
    torch.manual_seed(1)
    model = get_peft_model(small_model(), LoraConfig(**{"r": 4, "target_modules": targets, **options}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(str(folder))
    return folder


def take(backend, word, max_rank=16):
    return save_imported(read_imported(str(word), max_rank), backend._base, backend._store)


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (ATTENTION + MLP, {"lora_alpha": 12}),
        (ATTENTION, {"lora_alpha": 32, "use_rslora": True}),
        (MLP, {"lora_alpha": 64, "r": 16}),
    ],
)
def test_it_computes_what_peft_computes(tmp_path, targets, options):
    folder, backend = made(tmp_path / "mine", targets, **options), tiny_backend(tmp_path / "server")
    path = take(backend, folder)
    assert path == "tinker://imported/weights/mine"
    with torch.no_grad():
        base_TV = small_model()(input_ids=torch.tensor([PROMPT])).logits[0]
        logits_TV = PeftModel.from_pretrained(small_model(), folder)(input_ids=torch.tensor([PROMPT])).logits[
            0
        ]
    assert (logits_TV - base_TV).abs().max() > 1e-2
    expected = logits_TV.log_softmax(-1)[range(3), PROMPT[1:]].tolist()
    asked = request(backend.sampler(path), PROMPT, prompt_logprobs=True)
    assert sampled(backend, [asked])[0].prompt_logprobs[1:] == pytest.approx(expected, abs=1e-5)


def test_training_goes_on_from_it(tmp_path):
    folder, backend = made(tmp_path / "mine", lora_alpha=32), tiny_backend(tmp_path / "server")
    path = take(backend, f"start={folder}")
    assert path == "tinker://imported/weights/start"
    backend.load_state("s:train:0", path, with_optimizer=False)
    before = weights(backend, "s:train:0")
    losses = [loss for loss, _ in train(backend, "s:train:0", steps=4)]
    assert losses[-1] < losses[0]
    assert not any(
        torch.equal(before[name], matrix) for name, matrix in weights(backend, "s:train:0").items()
    )
    assert take(backend, f"start={folder}") == path  # of the next start, in place of the first
    backend.load_state("s:train:1", path, with_optimizer=True)
    for name, matrix in weights(backend, "s:train:1").items():
        assert torch.equal(matrix, before[name])


@pytest.mark.parametrize(
    ("targets", "options", "told"),
    [
        (
            ["q_proj", "v_proj"],
            {},
            r"adapts q_proj, v_proj, but this server needs adapters .* both: k_proj, ",
        ),
        ([*MLP, "q_proj"], {}, "Train it further with `qerl train --adapter`"),
        (ATTENTION, {"r": 17}, r"has rank 17, above this server's 16; give a larger --max_rank"),
        (ATTENTION, {"rank_pattern": {"q_proj": 2}}, "has rank_pattern="),
        (ATTENTION, {"alpha_pattern": {"q_proj": 2}}, "has alpha_pattern="),
        (ATTENTION, {"use_dora": True}, "has use_dora=True"),
        (ATTENTION, {"init_lora_weights": "pissa"}, "has init_lora_weights='pissa'"),
        (ATTENTION, {"bias": "lora_only"}, "has bias='lora_only'"),
        (ATTENTION, {"modules_to_save": ["embed_tokens"]}, "has modules_to_save=.*; convert it to that"),
        (ATTENTION, {"layers_to_transform": [0]}, "has layers_to_transform="),
        (ATTENTION, {"trainable_token_indices": [1]}, "has trainable_token_indices="),
    ],
)
def test_what_a_server_cannot_train_is_refused(tmp_path, targets, options, told):
    folder, backend = made(tmp_path / "mine", targets, **options), tiny_backend(tmp_path / "server")
    with pytest.raises(QeRLError, match=told):
        take(backend, folder)
    assert not backend.checkpoints()


def test_adapters_of_other_models_are_refused(tmp_path):
    folder, backend = made(tmp_path / "mine"), tiny_backend(tmp_path / "server")
    (folder / "policy.json").write_text(json.dumps({"fingerprint": "another"}))
    with pytest.raises(QeRLError, match="was trained on another model than tiny"):
        take(backend, folder)
    (folder / "policy.json").write_text(json.dumps({"fingerprint": "f"}))
    assert take(backend, folder)
    two = tiny_backend(tmp_path / "two", make_tiny_model(num_hidden_layers=2))
    with pytest.raises(QeRLError, match="does not fit tiny; start the server with the model"):
        take(two, folder)


def test_words_that_name_no_adapter_are_refused(tmp_path):
    folder = made(tmp_path / "mine")
    with pytest.raises(QeRLError, match=r"There is no .*adapter_config.json"):
        read_imported(str(tmp_path), 16)
    with pytest.raises(QeRLError, match="The name of a checkpoint is 'a b'"):
        read_imported(f"a b={folder}", 16)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(QeRLError, match="a server trains only LoRA adapters"):
        read_imported(str(folder), 16)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "ADALORA"}, "is a ADALORA adapter; a server trains only LoRA adapters"),
        ({"peft_type": None}, "is a None adapter"),
        ({"kasa_config": {"beta": 1}}, "has kasa_config="),
        ({"layer_replication": [[0, 1]]}, "has layer_replication="),
        ({"target_parameters": ["experts"]}, "has target_parameters="),
        ({"alora_invocation_tokens": [1]}, "has alora_invocation_tokens="),
        ({"of_a_newer_peft": True}, "has of_a_newer_peft=True, but a server trains only plain LoRA"),
        ({"init_lora_weights": None}, "has init_lora_weights=None"),
        ({"r": 0}, "has r=0, which is no rank"),
        ({"r": -4}, "has r=-4, which is no rank"),
        ({"r": "4"}, "has r='4', which is no rank"),
        ({"lora_alpha": None}, "has lora_alpha=None, which is no number"),
        ({"lora_alpha": float("nan")}, "has lora_alpha=nan, which is no number"),
    ],
)
def test_configs_are_refused_before_the_base_is_loaded(tmp_path, changes, told):
    folder = made(tmp_path / "mine")
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(QeRLError, match=told):
        read_imported(str(folder), 16)


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path):
    folder = made(tmp_path / "lr=1e-4" / "final")
    assert read_imported(str(folder), 16).name == "final"
    assert read_imported(f"mine={folder}", 16).folder == folder
    with pytest.raises(QeRLError, match=r"needs a name, as --adapter NAME=DIR: The name of a checkpoint"):
        read_imported(str(folder.parent), 16)


def test_the_name_of_another_model_is_told(tmp_path, caplog):
    folder, backend = made(tmp_path / "mine"), tiny_backend(tmp_path / "server")
    config = folder / "adapter_config.json"
    for base, says in (("some/Tiny", False), (None, False), ("Qwen/Qwen3-8B", True)):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))
        take(backend, folder)
        assert ("says that it was trained on Qwen/Qwen3-8B, but this server has tiny" in caplog.text) == says
    (folder / "policy.json").write_text(json.dumps({"fingerprint": "f"}))
    caplog.clear()
    take(backend, folder)
    assert "says that" not in caplog.text, "the fingerprint knows better"
