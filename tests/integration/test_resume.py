"""A run that is stopped and resumed ends with the same bits as one that was not."""

import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from qerl.config import QeRLConfig
from qerl.errors import QeRLError
from qerl.trainer.run import last_checkpoint, train

QUIET = Console(quiet=True)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="each rollout used once"),
        pytest.param(
            {"steps_per_generation": 2, "num_iterations": 2}, id="stopped while a rollout is half used"
        ),
        pytest.param(
            {"dynamic_sampling_rounds": 1, "algorithm": "dapo", "signal": "reward"}, id="dynamic sampling"
        ),
    ],
)
def test_resume_is_bit_exact(tiny_run, tmp_path, changes):
    stop_and_resume(tiny_run, tmp_path, changes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_resume_is_bit_exact_on_a_gpu(tiny_run, tmp_path, tiny_model, tiny_tokenizer):
    """The paged engine, NVFP4 weights, fused kernels; large enough for all of them."""
    model = tmp_path / "larger"
    tiny_model(
        "llama", hidden_size=256, intermediate_size=448, head_dim=64, initializer_range=0.05
    ).save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    stop_and_resume(tiny_run, tmp_path, {"model": str(model), "use_cpu": False, "num_iterations": 2})


def stop_and_resume(tiny_run, tmp_path, changes):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(QeRLConfig(**tiny_run(whole, **changes)), QUIET)
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    train(QeRLConfig(**tiny_run(resumed, resume_from_checkpoint="true", **changes)), QUIET)
    expected, actual, at_stop = (
        load_file(folder / "adapter_model.safetensors") for folder in (whole, resumed, whole / "checkpoint-3")
    )
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.equal(actual[name]), name
    assert any(not tensor.equal(at_stop[name]) for name, tensor in expected.items()), "training went on"


def test_a_checkpoint_cut_off_while_it_was_written_is_not_resumed_from(tmp_path):
    for step, complete in ((3, True), (10, True), (12, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if complete:
            (folder / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_folder_with_a_run_is_refused(tiny_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(QeRLError, match="already holds a run"):
        train(QeRLConfig(**tiny_run(tmp_path / "run")), QUIET)


def test_resume_without_a_checkpoint_is_an_error(tiny_run, tmp_path):
    with pytest.raises(QeRLError, match="no checkpoint to resume from"):
        train(QeRLConfig(**tiny_run(tmp_path / "none", resume_from_checkpoint="true")), QUIET)


def test_a_checkpoint_that_cannot_be_written_costs_only_itself(tiny_run, tmp_path, monkeypatch):
    """The disk fills while step 4 is saved: one sentence, and the checkpoint of step 2 is whole."""
    from transformers import Trainer

    run = tmp_path / "run"
    save = Trainer._save_optimizer_and_scheduler

    def full_disk(self, output_dir):
        if Path(output_dir).name == "checkpoint-4":
            raise OSError(28, "No space left on device")
        save(self, output_dir)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full_disk)
    with pytest.raises(QeRLError, match=r"checkpoint-4 could not be saved \(.*No space left"):
        train(QeRLConfig(**tiny_run(run, save_steps=2)), QUIET)
    assert last_checkpoint(run) == run / "checkpoint-2"
    assert not (run / "checkpoint-4").exists()
