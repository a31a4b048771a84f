"""A run that is stopped and resumed ends with the same bits as one that was not."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from qerl.config import QeRLConfig
from qerl.trainer.run import train

REWARD = """
def digits(completions, **kwargs):
    texts = [c[0]["content"] for c in completions]
    return [sum(ch.isdigit() for ch in text) / 8 for text in texts]
"""


@pytest.fixture
def settings(tiny_model, tiny_tokenizer, tmp_path):
    """Everything that has state is on: noise, evaluation, dropout, weight decay, a decaying learning rate."""
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)

    def make(output: Path, **changes) -> QeRLConfig:
        values = {
            "model": str(folder),
            "task": "arithmetic",
            "task_options": {"level": "wp1", "examples": 0, "train_size": 6, "test_size": 4},
            "reward_files": [f"{reward}:digits"],
            "output_dir": str(output),
            "lora_r": 4,
            "lora_dropout": 0.1,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 2,
            "max_completion_length": 8,
            "max_steps": 6,
            "save_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_samples": 2,
            "noise_sigma_start": 0.2,
            "noise_sigma_end": 0.1,
            "noise_stages": 3,
            "report_to": "none",
            "use_cpu": True,
        }
        return QeRLConfig(**(values | changes))

    return make


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="each rollout used once"),
        pytest.param(
            {"steps_per_generation": 2, "num_iterations": 2}, id="stopped while a rollout is half used"
        ),
        pytest.param({"dynamic_sampling_rounds": 1, "algorithm": "dapo"}, id="dynamic sampling"),
    ],
)
def test_resume_is_bit_exact(settings, tmp_path, changes):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    console = Console(quiet=True)
    train(settings(whole, **changes), console)
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    train(settings(resumed, resume_from_checkpoint="true", **changes), console)
    expected = load_file(whole / "adapter_model.safetensors")
    actual = load_file(resumed / "adapter_model.safetensors")
    at_stop = load_file(whole / "checkpoint-3" / "adapter_model.safetensors")
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.equal(actual[name]), name
    assert any(not tensor.equal(at_stop[name]) for name, tensor in expected.items()), "training went on"
