"""Settings that describe what is there already: a saved adapter, and TRL's arguments of the loader."""

import json

import pytest
import torch

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import dump, load_config

SAVED = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 4,
    "lora_dropout": 0.1,
    "target_modules": ["v_proj", "q_proj"],
}


@pytest.fixture
def saved(tmp_path):
    """``saved(**changes)``: a folder with an adapter's config."""

    def saved(**changes) -> str:
        (tmp_path / "adapter_config.json").write_text(json.dumps(SAVED | changes))
        return str(tmp_path)

    return saved


def test_settings_take_what_the_adapter_says(saved, tmp_path):
    config = QeRLConfig(output_dir="o", adapter=saved())
    described = (config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_target_modules)
    assert described == (8, 4, 0.1, ["q_proj", "v_proj"])
    recipe = tmp_path / "again.yaml"
    recipe.write_text(dump(config))
    again = load_config([recipe], {"model": "m", "task": "gsm8k"})
    assert (again.adapter, again.lora_r) == (config.adapter, 8)
    assert QeRLConfig(output_dir="o", adapter=saved(target_modules=".*_proj")).lora_target_modules is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_r": 16}, "lora_r is 16 and the adapter .* has r 8; remove lora_r"),
        ({"lora_target_modules": ["q_proj"]}, r"has target_modules \['q_proj', 'v_proj'\]; remove"),
        (
            {"tuning": "full", "weights": "bf16"},
            "tuning is 'full', which trains no adapter; remove it, or the",
        ),
    ],
)
def test_settings_that_say_otherwise_are_refused(saved, fields, message):
    with pytest.raises(QeRLError, match=message):
        QeRLConfig(output_dir="o", adapter=saved(), **fields)
    QeRLConfig(output_dir="o", adapter=saved(), lora_r=8, lora_target_modules=["v_proj", "q_proj"])


def test_what_is_no_adapter_is_refused(saved, tmp_path):
    with pytest.raises(QeRLError, match=r"there is no .*adapter_config\.json; check the path"):
        QeRLConfig(output_dir="o", adapter=str(tmp_path))
    with pytest.raises(QeRLError, match="is not the config of a LoRA adapter"):
        QeRLConfig(output_dir="o", adapter=saved(peft_type="IA3"))
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(QeRLError, match="cannot be read"):
        QeRLConfig(output_dir="o", adapter=str(tmp_path))


def test_arguments_of_the_loader_set_the_fields_that_mean_the_same():
    given = {"torch_dtype": torch.float32, "trust_remote_code": True, "use_cache": False, "device_map": None}
    config = QeRLConfig(output_dir="o", model_init_kwargs=given)
    assert (config.dtype, config.trust_remote_code, config.model_init_kwargs) == ("float32", True, None)
    with pytest.raises(QeRLError, match="model_init_kwargs is 3; it must be a mapping"):
        QeRLConfig(output_dir="o", model_init_kwargs=3)
    assert QeRLConfig(output_dir="o", model_init_kwargs={"dtype": "bfloat16"}).dtype == "bfloat16"


def test_arguments_of_the_sampler_set_the_fields_that_mean_the_same():
    given = {"temperature": 0.7, "max_new_tokens": 9, "stop_strings": "</a>", "do_sample": True}
    config = QeRLConfig(output_dir="o", generation_kwargs=given)
    assert (config.temperature, config.max_completion_length, config.stop_strings) == (0.7, 9, ["</a>"])
    assert config.generation_kwargs is None
    for wrong, message in (
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"repetition_penalty": 1.2}, "repetition_penalty has no effect in QeRL"),
        (
            {"min_tokens": 3},
            "has min_tokens, which is not supported: sampling is controlled by temperature, top_p",
        ),
        ({"stop": ["a"]}, "set stop_strings, which keeps the text"),
    ):
        with pytest.raises(QeRLError, match=message):
            QeRLConfig(output_dir="o", generation_kwargs=wrong)
    with pytest.raises(QeRLError, match="top_k is 3 and generation_kwargs has top_k 4; remove one of them"):
        QeRLConfig(output_dir="o", top_k=3, generation_kwargs={"top_k": 4})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation, which is not supported: the loader",
        ),
        ({"device_map": "auto"}, "device_map, which is not supported: each process"),
        ({"revision": "v2"}, "revision, which is not supported: download it"),
        ({"use_cache": True}, "use_cache, which is not supported"),
        ({"gibberish": 1}, "gibberish, which is not supported: model, weights, rounding and dtype"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be"),
    ],
)
def test_other_arguments_of_the_loader_are_refused(given, message):
    with pytest.raises(QeRLError, match=message):
        QeRLConfig(output_dir="o", model_init_kwargs=given)


def test_an_argument_of_the_loader_must_not_contradict_a_field():
    with pytest.raises(
        QeRLError, match="dtype is 'float32' and model_init_kwargs has torch_dtype 'bfloat16'"
    ):
        QeRLConfig(output_dir="o", dtype="float32", model_init_kwargs={"torch_dtype": torch.bfloat16})
