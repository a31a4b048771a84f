"""A run on two processes: collectives stay in step, and the adapter that comes out has moved."""

import json
import subprocess
import sys

import torch
import yaml
from safetensors.torch import load_file


def test_two_processes(tiny_run, tmp_path):
    """DAPO with truncation masked: ranks differ in samples, live groups, even in having a loss at all."""
    run, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    changes = {
        "algorithm": "dapo",
        "task_options": {"examples": 0, "train_size": 16, "test_size": 4},
        "max_steps": 4,
        "noise_stages": 2,
        "eval_strategy": "no",
        "save_strategy": "no",
    }
    recipe.write_text(yaml.safe_dump(tiny_run(run, **changes)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "qerl.cli", "train", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["noise/norms"] for row in rows[:4]] == [0, 0, 4, 4]
    adapter = load_file(run / "adapter_model.safetensors")
    assert any(torch.any(tensor != 0) for name, tensor in adapter.items() if "lora_B" in name)
