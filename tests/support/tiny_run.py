"""Fixtures of runs on a tiny model with all that has state on, and a reward that random text can earn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REWARD = """
def digits(completions, **kwargs):
    return [sum(ch.isdigit() for ch in c[0]["content"]) / 8 for c in completions]
"""


@pytest.fixture
def tiny_run(tiny_model, tiny_tokenizer, tmp_path) -> Callable[..., dict[str, Any]]:
    """``tiny_run(output, **changes)``: fields of a run; noise, evaluation, dropout, weight decay are on."""
    return make_tiny_run(tiny_model, tiny_tokenizer, tmp_path)


@pytest.fixture(scope="module")
def tiny_runs(tiny_model, tiny_tokenizer, tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """`tiny_run` for runs that several tests look at."""
    return make_tiny_run(tiny_model, tiny_tokenizer, tmp_path_factory.mktemp("tiny_runs"))


def make_tiny_run(tiny_model, tiny_tokenizer, folder: Path) -> Callable[..., dict[str, Any]]:
    """What `tiny_run` is, with model and rewards in a folder."""
    model = folder / "model"
    tiny_model("llama").save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    reward = folder / "reward.py"
    reward.write_text(REWARD)

    def fields(output: Path, **changes: Any) -> dict[str, Any]:
        values = {
            "model": str(model),
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
            "report_to": "none",
            "use_cpu": True,
        }
        noise = {"noise": True, "noise_sigma_start": 0.2, "noise_sigma_end": 0.1, "noise_stages": 3}
        return values | (noise if changes.get("noise", True) else {}) | changes

    return fields
