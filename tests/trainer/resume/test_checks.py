"""What a resume looks at before it goes on: the folder, the checkpoint and the settings."""

import io
import json
import shutil

import pytest
import yaml
from filelock import FileLock
from rich.console import Console

from qerl.errors import QeRLError
from qerl.run_folder import MANIFEST_FILE, checkpoints, last_checkpoint
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import load_config
from qerl.trainer.resume.changes import resume_point
from qerl.trainer.run import train

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
SHORT = {"max_steps": 2, "save_steps": 1, "noise_stages": 2, "eval_strategy": "no"}


def test_a_folder_with_a_run_is_refused(tiny_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(QeRLError, match="already holds a run"):
        train(QeRLConfig(**tiny_run(tmp_path / "run")), QUIET)
    with pytest.raises(QeRLError, match=r"no checkpoint to resume it from.*or delete that run"):
        train(QeRLConfig(**tiny_run(tmp_path / "run", resume_from_checkpoint="true")), QUIET)


def test_a_run_does_not_write_among_the_files_of_a_model_or_an_adapter(tiny_run, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for name, file in (("model", "config.json"), ("adapter", "adapter_config.json")):
        with pytest.raises(QeRLError, match=f"{file}.*choose another --output_dir"):
            train(QeRLConfig(**tiny_run(tmp_path / name)), QUIET)
    assert sorted(tmp_path.rglob("*")) == before


def test_resume_without_a_checkpoint_is_an_error(tiny_run, tmp_path):
    with pytest.raises(QeRLError, match="no checkpoint to resume from"):
        train(QeRLConfig(**tiny_run(tmp_path / "none", resume_from_checkpoint="true")), QUIET)


@pytest.fixture
def saved(tiny_run, tmp_path):
    """A run with checkpoints of steps 1 and 2, and its settings for a resume."""
    run = tmp_path / "run"
    train(QeRLConfig(**tiny_run(run, **SHORT)), QUIET)

    def resume(**changes):
        fields = tiny_run(run, resume_from_checkpoint="true", **SHORT)
        console = Console(file=io.StringIO(), width=1000)
        train(QeRLConfig(**fields | changes), console)
        return console.file.getvalue()

    return run, resume


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_named(saved):
    run, resume = saved
    optimizer = run / "checkpoint-2" / "optimizer.pt"
    with optimizer.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(
        QeRLError, match=r"optimizer.pt has 100 bytes instead of .*--resume_from_.*/checkpoint-1"
    ):
        resume()
    optimizer.unlink()
    with pytest.raises(QeRLError, match=r"checkpoint-2 is damaged: optimizer.pt is missing"):
        resume()
    resume(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert [path.name for path in checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    assert optimizer.exists()


def test_a_checkpoint_that_does_not_say_its_learning_rate_had_the_former_default(tiny_run, tmp_path):
    fields = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "noise": False, "learning_rate": 1e-6}
    train(QeRLConfig(**tiny_run(tmp_path / "run", **fields)), QUIET)
    config = tmp_path / "run" / "checkpoint-1" / "config.yaml"
    config.write_text(config.read_text().replace("\nlearning_rate:", "\n#earning_rate:"))  # of the same size

    def resume(**changes):
        fields = {"resume_from_checkpoint": str(config.parent), "max_steps": 2, "noise": False} | changes
        return resume_point(QeRLConfig(**tiny_run(tmp_path / "new", **fields)), QUIET)

    with pytest.raises(QeRLError, match=r"another learning_rate \(learning_rate 1e-06 -> 1e-05\)"):
        resume(learning_rate=None)
    assert resume(learning_rate=1e-6) == str(config.parent)


def test_what_a_checkpoint_cannot_go_on_with_is_refused(saved, tiny_model, tmp_path):
    run, resume = saved
    for name, value in {"lora_r": 8, "learning_rate": 1e-3, "weight_decay": 0.0, "model": "another"}.items():
        with pytest.raises(QeRLError, match=f"cannot be resumed with another {name} "):
            resume(**{name: value})
    with pytest.raises(QeRLError, match=r"has a later checkpoint, checkpoint-2"):
        resume(resume_from_checkpoint=str(run / "checkpoint-1"))
    another = tmp_path / "moved" / "model"  # the same name and shape, other weights
    shutil.copytree(tmp_path / "model", another)
    tiny_model("llama", seed=1).save_pretrained(another)
    with pytest.raises(
        QeRLError, match=r"checkpoint-2 was trained on a model with other norms .* than .*moved/model; give"
    ):
        resume(model=str(another))


def test_two_runs_do_not_write_into_one_folder(saved):
    run, resume = saved
    with (
        FileLock(run / "_lock"),
        pytest.raises(
            QeRLError, match=r"Another run writes to .*run at present; wait for its end, or choose"
        ),
    ):
        resume(max_steps=3)
    assert last_checkpoint(run) == run / "checkpoint-2"
    resume(max_steps=3)
    assert last_checkpoint(run) == run / "checkpoint-3"


def test_other_settings_on_a_resume_are_said(saved):
    run, resume = saved
    said = resume(max_steps=3, noise_sigma_start=0.3, save_steps=3, warmup_steps=1)
    assert "These settings differ from those of checkpoint-2" in said
    for change in ("max_steps 2 -> 3 (the schedules", "noise_sigma_start 0.2 -> 0.3", "warmup_steps 0 -> 1"):
        assert change in said
    assert "save_steps" not in said
    assert last_checkpoint(run) == run / "checkpoint-3"
    assert "settings differ" not in resume(max_steps=3, noise_sigma_start=0.3, warmup_steps=1)


def test_settings_that_the_default_loss_implies_are_compared_by_their_values(saved):
    run, resume = saved
    (written,) = {path.read_text() for path in run.glob("checkpoint-*/config.yaml")}
    assert "loss_type: dppo_kl" in written and "epsilon:" not in written
    said = resume(max_steps=3, loss_type="dapo")
    assert "epsilon 0.05 -> 0.2" in said and "delta 20.0 -> None" in said and "beta" not in said
    recipe = run.parent / "own.yaml"
    fields = yaml.safe_load(written) | {"max_steps": 3, "beta": 0.0, "epsilon": 0.05, "weight_decay": 0.1}
    recipe.write_text(yaml.safe_dump(fields | {"resume_from_checkpoint": str(run / "checkpoint-2")}))
    console = Console(file=io.StringIO(), width=1000)
    resume_point(load_config([recipe], {"output_dir": str(run.parent / "new")}), console)
    assert ": max_steps 2 -> 3 (" in console.file.getvalue() and "epsilon" not in console.file.getvalue()


def test_fields_that_studies_alone_have_are_said_on_a_resume_where_they_asked_for_something(saved):
    """As QeRL 0.2 wrote them into the settings of a checkpoint."""
    run, resume = saved
    config, file = (run / "checkpoint-2" / name for name in ("config.yaml", MANIFEST_FILE))
    config.write_text(config.read_text() + "noise_share: 1.0\nnoise_target_kl: null\nnoise_in_loss: true\n")
    manifest = json.loads(file.read_text())
    manifest["files"]["config.yaml"] = config.stat().st_size
    file.write_text(json.dumps(manifest))
    said = resume(max_steps=3)
    assert "noise_in_loss True -> None" in said and "noise_share" not in said and "target_kl" not in said


def test_another_device_on_a_resume_is_said(saved):
    """A GPU's multiprocessors decide how the products of a rollout are cut along K."""
    run, resume = saved
    h100 = {"device": "NVIDIA H100 with 132 multiprocessors"}
    for checkpoint in checkpoints(run):
        manifest = json.loads((checkpoint / MANIFEST_FILE).read_text())
        assert manifest["device"] == "the CPU"
        (checkpoint / MANIFEST_FILE).write_text(json.dumps(manifest | h100))
    said = resume(max_steps=3)
    assert "checkpoint-2 was made on NVIDIA H100 with 132 multiprocessors and continues on the CPU" in said
    assert "was made on" not in resume(max_steps=3)


def test_a_half_used_rollout_is_not_cut_anew(tiny_run, tmp_path):
    halves = {"steps_per_generation": 2, "max_steps": 3, "save_steps": 1, "eval_strategy": "no"}
    train(QeRLConfig(**tiny_run(tmp_path / "run", **halves)), QUIET)
    again = tiny_run(tmp_path / "run", **halves | {"resume_from_checkpoint": "true", "num_generations": 4})
    with pytest.raises(QeRLError, match=r"half used, .*num_generations 2 -> 4"):
        train(QeRLConfig(**again), QUIET)


def test_metrics_with_a_torn_last_line_go_on(saved):
    run, resume = saved
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 2, "rew')
    resume(max_steps=3)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert sorted(set(steps)) == [0, 1, 2, 3], "0 has the facts of the run"
