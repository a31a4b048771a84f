"""Runs in processes of their own: their recipes, the commands that start them, and what they leave."""

import json
import subprocess
import sys
from pathlib import Path

import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def write_recipe(fields, run, settings):
    """The file of a recipe beside the folder that its run will make."""
    recipe = run.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(fields(run, **settings)))
    return str(recipe)


def run_python(*words):
    """Run Python with these arguments in the repository; what it wrote is shown where it fails."""
    run_command(sys.executable, *words)


def run_command(*command, env=None):
    """Run a command in the repository; what it wrote is shown where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=env
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


def results(run):
    """The rows logged of training, and the adapter."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["update_path"] == {"kernels": "none (its kernels need a CUDA GPU)"}
    return rows[1:], load_file(run / "adapter_model.safetensors")
