"""The commands as a user types them, on a tiny model."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import pytest
import yaml
from rich.console import Console

from qerl import cli
from qerl.cli import main
from qerl.fp4.format import PackedRows
from qerl.settings.recipe import load_config
from qerl.trainer.preflight import optimizer_steps


@pytest.fixture
def recipe(tiny_run, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_run(tmp_path / "run", eval_strategy="no")))
    return path


@pytest.fixture
def warned():
    """Warnings that a user would see, as they are given. Python shows those of deprecation to developers."""
    with warnings.catch_warnings(record=True) as given:
        warnings.resetwarnings()
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        yield given


@pytest.mark.slow
def test_train_eval_report(recipe, tmp_path, capsys, warned, monkeypatch):
    run, model = tmp_path / "run", tmp_path / "model"
    dequantised, write_dense = [], PackedRows.write_dense
    monkeypatch.setattr(PackedRows, "write_dense", lambda *args: dequantised.append(1) or write_dense(*args))
    assert main(["train", str(recipe), "--max_steps", "3", "--noise_stages=2"]) == 0
    assert len(dequantised) == 2 * 14, "on a CPU once for the check of packed rows and once for all steps"
    assert {"config.yaml", "metrics.jsonl", "adapter_model.safetensors", "adapter_config.json"} <= {
        path.name for path in run.iterdir()
    }
    options = "{examples: 0, test_size: 4}"
    score = ["eval", str(model), "--adapter", str(run), "--task", "arithmetic", "--task_options", options]
    assert main([*score, "--max_tokens", "8", "--out", str(tmp_path / "scores")]) == 0
    assert "The adapter is in use" in capsys.readouterr().out
    result = json.loads((tmp_path / "scores" / "result.json").read_text())
    assert result["problems"] == 4
    assert (result["source"]["weights"], result["source"]["rounding"]) == ("nvfp4", "mse")
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert not [str(one.message) for one in warned], "nobody can act on what libraries call each other"


def test_quantize_then_generate(recipe, tmp_path, capsys):
    packed = tmp_path / "packed"
    assert main(["quantize", str(tmp_path / "model"), str(packed)]) == 0
    assert main(["quantize", str(tmp_path / "model"), str(packed)]) == 2, "never overwrites"
    capsys.readouterr()
    assert main(["generate", str(packed), "hello", "--max_tokens", "4"]) == 0
    assert "temperature 0.0 (default)" in capsys.readouterr().out


def test_dry_run_prints_a_recipe_and_does_nothing(recipe, tmp_path, capsys):
    assert main(["train", "--learning_rate", "1e-4", str(recipe), "--dry_run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["learning_rate"] == 1e-4
    assert not (tmp_path / "run").exists()
    assert yaml.safe_load(recipe.read_text()).keys() <= printed.keys(), "all that the recipe sets"
    assert main(["train", "demo", "--dry_run", "--max_grad_norm", "1.0", "--output_dir", "none"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    needed = (8, 8, 8, 1.0, 42, 1.0)
    names = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "temperature")
    assert tuple(printed[name] for name in (*names, "seed", "max_grad_norm")) == needed
    assert "clip_cov_lb" not in printed


@pytest.mark.parametrize("command", ["train", "plan", "demo"])
def test_help_lists_the_fields(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--reward_timeout [10.0] Seconds a reward function may take" in printed
    assert (
        "Data: The task with its prompts and rewards" in printed
        and "`qerl fields NAME` explains one" in printed
    )


def test_a_reader_that_stops_early_sees_no_traceback(monkeypatch, capsys):
    """As in `qerl fields | head`: the pipe is closed before all is written."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(cli, "console", Console())  # rich's is quiet from then on
    with open(writer, "w") as closed:  # noqa: PTH123 - a descriptor, not a path
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit):
            main(["fields"])
    assert not capsys.readouterr().err


def test_a_disk_without_room_for_what_is_printed_is_one_sentence(monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli, "console", Console(file=Full()))
    assert main(["recipes"]) == 2
    assert "The output: No space left on device; make room." in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["watch", "d/" * 2500],
        ["plan", "n" * 300],
        ["generate", "n" * 5000, "hi"],
        ["quantize", "MODEL", "n" * 300],
        ["train", "RECIPE", "--output_dir", "n" * 300],
        ["train", "RECIPE", "--output_dir", "n" * 300, "--dry_run"],
        ["train", "RECIPE", "--reward_files", "n" * 300 + ".py:f"],
    ],
)
def test_names_that_no_file_can_have_end_in_one_sentence(recipe, tmp_path, words, capsys):
    places = {"MODEL": str(tmp_path / "model"), "RECIPE": str(recipe)}
    words = [places.get(word, word) for word in words]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert re.search(r"\.\.\..*: File name too long; give a shorter name\.", printed), printed
    assert len(printed) < 400, "a name without end is shortened"
    assert main([*words, "a\0b"]) == 2
    assert "holds a NUL character" in capsys.readouterr().err


def test_text_fields_take_the_word_as_it_is(recipe, tmp_path, capsys):
    reward = f"{tmp_path / 'reward.py'}:digits"
    words = [
        "--output_dir",
        "2026",
        "--save_strategy",
        "no",
        "--run_name",
        "a: #1",
        "--kv_cache_dtype",
        "auto",
    ]
    assert main(["train", str(recipe), *words, "--reward_files", reward, "--dry_run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert [printed[key] for key in ("output_dir", "save_strategy", "run_name")] == ["2026", "no", "a: #1"]
    assert printed["reward_files"] == [reward]


def test_a_run_needs_no_recipe(tmp_path, capsys):
    words = ["train", "--task", "arithmetic", "--model", "owner/model", "--dry_run"]
    assert main(words) == 2
    assert "output_dir is not set" in capsys.readouterr().err
    assert main([*words, "--output_dir", str(tmp_path)]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["task"], printed["model"]) == ("arithmetic", "owner/model")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_rank", "8"], "did you mean 'lora_r'"),
        (["--task", "gsm9k"], "gsm8k"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--weights", "nf4"], "need a CUDA device"),
        (["--max_prompt_length", "1"], "training prompts has at most 1 tokens"),
        (["--seed"], "--seed needs a value"),
        (["--seed", "--max_steps", "3"], "--seed needs a value"),
        (["--seed="], "--seed needs a value"),
        (["--seed", "1", "--seed=2"], "--seed is given twice"),
        (["--seed", "[0-9]+"], "--seed has a value that is not valid YAML"),
        (["--task_options", "{a: ["], "--task_options has a value that is not valid YAML"),
        (["--zebra", "x"], "unknown key 'zebra'; `qerl fields` lists the fields"),
        (["--max_steps", "ten"], "max_steps is 'ten'"),
    ],
)
def test_mistakes_get_one_sentence_and_status_2(recipe, words, message, capsys):
    assert main(["train", str(recipe), *words]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_that_can_be_resumed(recipe, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "qerl", "train", str(recipe)]
    process = subprocess.Popen(
        [*command, "--max_steps", "2000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "--resume_from_checkpoint true" in output
    step = max(int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*"))
    words = [str(recipe), "--max_steps", str(step + 1), "--resume_from_checkpoint", "true"]
    assert main(["train", *words]) == 0
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == step + 1


def test_dry_run_looks_at_the_folder_and_the_length_of_the_run(recipe, tmp_path, capsys):
    words = ["train", str(recipe), "--dry_run"]
    epochs = ["--max_steps", "-1", "--num_train_epochs", "1", "--noise_stages", "5000"]
    assert main([*words, *epochs]) == 2
    assert "5000 stages but the run only" in capsys.readouterr().err
    assert main([*words, "--resume_from_checkpoint", "true"]) == 2
    assert "has no checkpoint to resume from" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert main(words) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_dry_run_looks_into_the_models_folder(recipe, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["train", str(recipe), "--dry_run", "--model", str(tmp_path / "empty")]) == 2
    assert "has no config.json, so it is not a model" in capsys.readouterr().err
    assert main(["train", str(recipe), "--dry_run", "--model", "none.gguf"]) == 2
    assert "There is no file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"num_iterations": 2}, {"steps_per_generation": 4}])
def test_the_length_of_a_run_in_epochs_is_known_before(recipe, tmp_path, fields):
    values = {
        name: value for name, value in yaml.safe_load(recipe.read_text()).items() if "noise" not in name
    }
    values |= {"max_steps": -1, "num_train_epochs": 1.5}
    values |= {"task_options": {"train_size": 9, "examples": 0}, "gradient_accumulation_steps": 2} | fields
    recipe.write_text(yaml.safe_dump(values))
    steps = optimizer_steps(load_config([recipe], {}), 9)
    assert main(["train", str(recipe)]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == steps


def test_dashes_in_flags_are_underscores(recipe, capsys):
    words = ["--learning-rate", "1e-4", "--task-options={level: wp1, examples: 0}", "--dry-run"]
    assert main(["train", str(recipe), *words]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["learning_rate"], printed["task_options"]["level"]) == (1e-4, "wp1")


def test_recipes_of_the_package_have_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "gsm8k", "nvfp4-aqn", "--model", "owner/model", "--dry_run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["task"], printed["noise"], printed["model"]) == ("gsm8k", True, "owner/model")
    assert printed["output_dir"] == "runs/gsm8k-nvfp4-aqn"
    assert not any(tmp_path.iterdir())


def test_demo_finds_its_recipe_anywhere(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("qerl.demo.run_demo", lambda config, console: taken.append(config) or True)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--seed", "7"]) == 0
    assert (taken[0].task, taken[0].seed) == ("arithmetic", 7)
