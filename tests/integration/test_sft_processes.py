"""Supervised fine-tuning on two processes: gradients, losses and held-out loss are those of one."""

import pytest
import torch
from rich.console import Console

from qerl.run_folder import read_metrics
from qerl.settings.config import QeRLConfig
from qerl.trainer.run import train
from tests.support.runs import results, run_python, write_recipe

pytestmark = pytest.mark.slow

SFT = {
    "algorithm": "sft",
    "noise": False,
    "num_generations": 8,
    "num_generations_eval": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 4,
    "eval_samples": 4,
    "task_options": {"level": "wp12", "examples": 0, "train_size": 16, "test_size": 4},
    "reward_files": [],
    "lora_dropout": 0.0,
    "max_steps": 3,
    "save_strategy": "no",
    # Adam moves a number whose gradient is rounding as far as any other, unless epsilon is above that.
    "adam_epsilon": 1e-3,
}


def test_two_processes_learn_what_one_does(tiny_runs, tmp_path):
    """Demonstrations of unlike length, so a mean of the processes' means would be another loss."""
    recipe = write_recipe(tiny_runs, tmp_path / "two", SFT | {"per_device_train_batch_size": 2})
    run_python("-m", "tests.support.two_processes", recipe)
    one = tmp_path / "one"
    train(QeRLConfig(**tiny_runs(one, **SFT | {"per_device_train_batch_size": 4})), Console(quiet=True))
    (rows, adapter), (others, expected) = (results(tmp_path / name) for name in ("two", "one"))
    for name in ("loss", "grad_norm", "eval_loss", "eval_reward"):
        found, wanted = ([row[name] for row in each if name in row] for each in (rows, others))
        assert len(wanted) == 3 and found == pytest.approx(wanted, rel=1e-5), name
    assert any(torch.any(tensor != 0) for name, tensor in expected.items() if "lora_B" in name)
    for name, tensor in expected.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=0, atol=1e-5)
    assert read_metrics(tmp_path / "two")[0]["max_steps"] == 3
