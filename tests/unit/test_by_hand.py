"""A trainer made by hand: no field of the settings is accepted and ignored."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from qerl.errors import QeRLError
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.by_hand import RUN_FIELDS
from qerl.trainer.grpo import QeRLTrainer

ROWS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": "x" * length}] for length in (2, 3, 4, 40, 50, 60)]}
)


def ones(completions, **_):
    return [1.0] * len(completions)


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def make(adapter: bool = True, rewards=ones, acted_on=(), **fields) -> QeRLTrainer:
        model = tiny_model("llama")
        if adapter:
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
        args = QeRLConfig(
            output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, noise=False,
            max_completion_length=8, report_to="none", use_cpu=True, **fields,
        )  # fmt: skip
        engine = PortableEngine(model, 0)
        return QeRLTrainer(
            model, rewards, args, ROWS, engine, processing_class=tiny_tokenizer, acted_on=acted_on
        )

    return make


SOURCES = {
    "model": "some/model",
    "task": "gsm8k",
    "task_options": {"level": "wp1"},
    "reward_files": ["a.py:f"],
    "eval_samples": 3,
    "rounding": "rtn",
    "max_sequences": 1,
    "kv_cache_dtype": "fp8",
    "resume_from_checkpoint": True,
}


@pytest.mark.parametrize(("name", "value"), SOURCES.items())
def test_a_field_that_names_a_source_is_refused(make, name, value):
    with pytest.raises(QeRLError, match=f"{name} is set, and `qerl train` alone reads it; remove it: "):
        make(**{name: value})
    make(acted_on=RUN_FIELDS, **{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "mxfp4"}, "weights is 'mxfp4' and the model that was handed in has 'bf16'"),
        ({"weights": "bf16", "tuning": "full"}, "tuning is 'full' and the model .* has 'lora'"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16' and the model .* has 'float32'"),
        ({"lora_r": 8}, "lora_r is 8 and the model .* has 4"),
        ({"lora_alpha": 16}, "lora_alpha is 16 and the model .* has 8"),
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1 and the model .* has 0.0"),
        (
            {"lora_target_modules": ["q_proj"]},
            r"lora_target_modules is \['q_proj'\] and .* has \['q_",
        ),
    ],
)
def test_a_field_that_contradicts_the_model_is_refused(make, fields, message):
    with pytest.raises(QeRLError, match=message):
        make(**fields)


def test_what_agrees_with_the_model_is_accepted(make):
    make(lora_r=4, lora_alpha=8, lora_target_modules=["v_proj", "q_proj"], dtype="float32", weights="bf16")
    make(adapter=False, tuning="full", weights="bf16")
    with pytest.raises(QeRLError, match="lora_r is set and the model that was handed in has no LoRA adapter"):
        make(adapter=False, lora_r=4)


def test_every_field_of_a_run_is_decided():
    described = {"weights", "tuning", "dtype", "max_prompt_length", "lora_r", "lora_alpha", "lora_dropout"}
    assert SOURCES.keys() | described | {"lora_target_modules"} == RUN_FIELDS


def test_long_prompts_are_left_out(make):
    trainer = make(max_prompt_length=40)
    assert [len(row["prompt"][0]["content"]) for row in trainer.train_dataset] == [2, 3, 4]
    assert len(make().train_dataset) == 6
    with pytest.raises(QeRLError, match="No prompt has at most 1 tokens"):
        make(max_prompt_length=1)


def test_the_length_penalty_is_one_of_the_rewards(make):
    trainer = make(overlong_buffer=0.5)
    assert trainer.reward_func_names == ["ones", "soft_overlong_punishment_reward"]
    penalty = trainer.reward_funcs[1]
    ids = [[5] * length for length in (4, 6, 8)]
    assert penalty(prompts=[""] * 3, completions=[""] * 3, completion_ids=ids) == [0.0, -0.5, -1.0]
    assert make().reward_func_names == ["ones"]


def test_noise_of_a_run_that_is_too_short_is_refused_before_the_first_rollout(make):
    del make
    with pytest.raises(QeRLError, match="10 stages but the run only 3 steps"):
        QeRLConfig(output_dir="o", max_steps=3)
    assert QeRLConfig(output_dir="o", max_steps=30).noise_schedule_of(30).sigma(0) == 0.0
    assert torch.tensor(QeRLConfig(output_dir="o").noise_schedule_of(30).sigma(29)) > 0
