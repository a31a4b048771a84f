"""A run on two processes: collectives stay in step, and the adapter that comes out has moved."""

import json
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file


def test_two_processes(tiny_run, tmp_path):
    """DAPO: ranks differ in samples, live groups, even in having a loss at all.

    Then in chunks, of which ranks have different numbers, with the same result.
    """
    rows, adapter = run_on_two(tiny_run, tmp_path / "whole")
    assert [row["noise/norms"] for row in rows[:4]] == [0, 0, 4, 4]
    assert any(torch.any(tensor != 0) for name, tensor in adapter.items() if "lora_B" in name)
    chunk_rows, chunk_adapter = run_on_two(tiny_run, tmp_path / "chunks", tokens_per_forward=40)
    for row, other in zip(rows[:4], chunk_rows[:4], strict=True):
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
    for name, tensor in adapter.items():
        torch.testing.assert_close(chunk_adapter[name], tensor, rtol=0, atol=1e-4)


def test_processes_that_differ_in_forward_passes_from_the_second_step_on(tiny_run, tmp_path):
    """The first process computes one sample, the second several chunks: no collective meets another one.

    Nor where half of the samples are noisy, the others' probabilities under noise are computed beside them,
    and sigma follows the KL of both processes.
    """
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import os\n\n\ndef by_process(completions, **kwargs):\n"
        "    return [float(i * int(os.environ['RANK'])) for i in range(len(completions))]\n"
    )
    rows, _ = run_on_two(
        tiny_run, tmp_path / "run", tokens_per_forward=20, dynamic_sampling_rounds=0,
        reward_files=[f"{rewards}:by_process"], noise_share=0.5, noise_target_kl=1e-4,
        vllm_importance_sampling_mode="token_balance",
    )  # fmt: skip
    assert [row["noise/kl_target"] for row in rows[:4]] == pytest.approx([0, 0, 1e-4, 1e-4])
    assert rows[2]["noise/kl"] > 1e-4 and rows[3]["noise/sigma"] < rows[2]["noise/sigma"]
    assert [row["grad_norm"] > 0 for row in rows[:4]] == [True] * 4


def run_on_two(tiny_run, run, **changes):
    """The rows logged of training and the adapter."""
    settings = {
        "algorithm": "dapo",
        "signal": "reward",  # random text is never right
        "dynamic_sampling_rounds": 1,
        "max_completion_length": 4,  # so short that many groups are equal
        "task_options": {"examples": 0, "train_size": 16, "test_size": 4},
        "lora_dropout": 0.0,
        "max_steps": 4,
        "noise_stages": 2,
        "eval_strategy": "no",
        "save_strategy": "no",
    }
    recipe = run.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(tiny_run(run, **settings | changes)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "qerl.cli", "train", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["update_path"] == {"kernels": "none (its kernels need a CUDA GPU)"}
    return rows[1:], load_file(run / "adapter_model.safetensors")
