"""A run on two processes: collectives stay in step, and the adapter that comes out has moved."""

import json
import subprocess
import sys

import torch
import yaml
from safetensors.torch import load_file

REWARD = """
def digits(completions, **kwargs):
    return [sum(ch.isdigit() for ch in c[0]["content"]) / 8 for c in completions]
"""


def test_two_processes(tiny_model, tiny_tokenizer, tmp_path):
    """DAPO with truncation masked: ranks differ in samples, live groups, even in having a loss at all."""
    model, run, recipe = tmp_path / "model", tmp_path / "run", tmp_path / "recipe.yaml"
    tiny_model("llama").save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "model": str(model),
        "task": "arithmetic",
        "task_options": {"examples": 0, "train_size": 16, "test_size": 4},
        "reward_files": [f"{tmp_path}/reward.py:digits"],
        "algorithm": "dapo",
        "lora_r": 4,
        "learning_rate": 1e-2,
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "max_steps": 4,
        "noise_stages": 2,
        "noise_sigma_start": 0.2,
        "save_strategy": "no",
        "use_cpu": True,
        "output_dir": str(run),
    }
    recipe.write_text(yaml.safe_dump(settings))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "qerl.cli", "train", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["noise/norms"] for row in rows[:4]] == [0, 0, 4, 4]
    adapter = load_file(run / "adapter_model.safetensors")
    assert any(torch.any(tensor != 0) for name, tensor in adapter.items() if "lora_B" in name)
