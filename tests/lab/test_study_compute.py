"""A study on a real model, tiny and random, from its YAML to its page."""

import json
from pathlib import Path

import pytest
import torch

from lab.__main__ import main
from lab.study.compute import StudyMake
from lab.study.followed import Followed
from lab.study.spec import make_study
from qerl import yaml12
from qerl.errors import QeRLError
from qerl.models.fingerprint import checkpoint_fingerprint
from qerl.source import commit


@pytest.fixture
def values(llama_folder):
    return {
        "model": str(llama_folder),
        "task": "arithmetic",
        "task_options": {"level": "wp12", "examples": 0, "train_size": 16, "test_size": 8},
        "steps": 3,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_completion_length": 4,
        "eval_steps": 2,
        "eval_samples": 4,
        "learning_rates": [1e-3, 1e-2],
        "tuning_seeds": 1,
        "test_seeds": 2,
        "arms": {
            "noisy": {"noise": True, "noise_stages": 2, "lora_r": 2},
            "follows": {"match_entropy": "noisy", "lora_r": 2},
        },
    }


@pytest.mark.slow
def test_a_study_trains_a_model(values, tmp_path):
    file, out = tmp_path / "x.yaml", tmp_path / "out"
    file.write_text(yaml12.dump(values))
    assert main(["study", str(file), "--output_dir", str(out)]) == 0
    found = [json.loads(path.read_text()) for path in sorted((out / "runs").iterdir())]
    assert len(found) == 2 * (2 + 2)
    for run in found:
        assert run["eval_at"] == [0, 2, 3]
        assert {len(values) for values in run["steps"].values()} == {3}
        assert {"rollout/entropy", "sampling/kl", "rewards/accuracy/mean", "diverged"} <= run["steps"].keys()
        assert {"accuracy", "accuracy/steps_1", "entropy"} <= run["evaluations"].keys()
        assert run["facts"]["device"] == "CPU" and run["facts"]["dtype"] == "float32"
        assert run["facts"]["fingerprint"] == checkpoint_fingerprint(Path(values["model"]))
        assert run["facts"]["commit"] == commit()
    text = (out / "study.html").read_text()
    assert "Greedy accuracy, steps 1" in text and "Entropy of the policy that samples" in text


def test_a_batch_goes_on_as_if_it_had_not_been_interrupted(values):
    study = make_study(values)
    make = StudyMake(study)
    runs = study.tuning_runs(study.arms["noisy"])
    whole = make(runs, [None] * len(runs))
    records = [whole.step() for _ in range(3)]
    first, second = (make(runs, [None] * len(runs)) for _ in range(2))
    assert first.step() == records[0]
    second.load_state(first.state())
    assert [second.step(), second.step()] == records[1:]
    assert second.evaluate(0) == whole.evaluate(0)


def test_one_base_serves_all_arms_of_a_format(values, monkeypatch):
    study = make_study(values)
    make = StudyMake(study)
    make(study.tuning_runs(study.arms["noisy"]), [None] * 2)
    monkeypatch.setattr("lab.study.compute.load_model", None)
    make(study.test_runs(study.arms["follows"], 1e-3), [Followed("x", [1.0] * 3, [0.0, 0.0, 0.1])] * 2)


def test_what_bounds_memory_reaches_the_batches(values):
    bounds = {"tokens_per_forward": 77, "rows_at_once": 5}
    settings = StudyMake(make_study(values | bounds)).settings
    assert (settings.tokens_per_forward, settings.rows_at_once) == (77, 5)


def test_what_the_machine_or_the_task_lacks_is_said_first(values):
    with pytest.raises(
        QeRLError,
        match=r"eval_samples is 9, but the task .* has only 8 held-out problems; lower eval_samples",
    ):
        StudyMake(make_study(values | {"eval_samples": 9}))
    if not torch.cuda.is_available():
        with pytest.raises(QeRLError, match="nf4 weights need a CUDA device"):
            StudyMake(make_study(values | {"all_arms": {"weights": "nf4"}}))
