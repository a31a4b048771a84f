"""Full tuning: every weight trains, biases too, the engine follows, and a resume has the same bits."""

import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qerl.settings.config import QeRLConfig
from qerl.trainer.run import train

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
FULL = {
    "tuning": "full", "weights": "bf16", "noise": False, "eval_strategy": "no", "max_steps": 4,
    "save_steps": 2, "beta": 0.1, "num_iterations": 2, "loss_type": "dapo",
}  # fmt: skip


@pytest.fixture
def full_run(tiny_run, tiny_model, tmp_path):
    """``full_run(folder, **changes)``: settings of a run of a model whose q, k, v and o have biases."""
    model = tmp_path / "with-biases"
    tiny_model("llama", attention_bias=True).save_pretrained(model)
    for file in (tmp_path / "model").glob("*"):
        if not (model / file.name).exists():
            shutil.copy(file, model)
    return lambda folder, **changes: QeRLConfig(**tiny_run(folder, model=str(model), **FULL, **changes))


def test_full_tuning_trains_every_weight_and_resumes(full_run, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(full_run(whole), QUIET)
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    train(full_run(resumed, resume_from_checkpoint="true"), QUIET)
    start, end, other = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "with-biases", whole, resumed)
    )
    for name, weight in start.items():
        assert not weight.equal(end[name]), name
        assert end[name].equal(other[name]), name
    assert sum("q_proj.bias" in name for name in end) == 2
    assert not list(whole.rglob("reference*"))
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    mismatch = [row["sampling/kl"] for row in rows if "sampling/kl" in row]
    assert len(mismatch) == 4 and max(mismatch) < 1e-8, "the sampler is the policy as it is"
    kl = [row["kl"] for row in rows if "kl" in row]
    assert kl[0] < 1e-8 < 1e-5 < kl[-1]
    model = AutoModelForCausalLM.from_pretrained(whole)
    assert all(torch.equal(tensor, end[name]) for name, tensor in model.state_dict().items())
