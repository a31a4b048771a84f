"""`qerl eval` of several tasks and several checkpoints: averages, the best one named, going on."""

import json
import shutil

import pytest
import torch
import yaml

from qerl.cli import main
from qerl.lora.adapter import add_lora, exchange_adapter, load_adapter
from qerl.models import decide
from qerl.models.load import load_model
from qerl.rollout.portable.engine import PortableEngine
from tests.support.models import make_tiny_model, make_tiny_tokenizer, move_adapter

pytestmark = pytest.mark.slow

LEVELS = {"wp1": {"level": "wp1"}, "wp2": {"level": "wp2"}}


def base(folder):
    return load_model(folder / "model", "nvfp4", torch.float32, "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a tiny model and, of a run on it, two checkpoints whose adapters differ."""
    folder = tmp_path_factory.mktemp("several")
    make_tiny_model("llama").save_pretrained(folder / "model")
    make_tiny_tokenizer().save_pretrained(folder / "model")
    model = add_lora(base(folder), rank=4, alpha=8, dropout=0.0)
    torch.manual_seed(0)
    for step in (1, 2):
        move_adapter(model).save_pretrained(folder / "run" / f"checkpoint-{step}")
    return folder


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "mine.yaml"
    tasks = {
        name: {"task": "arithmetic", "task_options": {**level, "examples": 0, "test_size": 4}}
        for name, level in LEVELS.items()
    }
    tasks["wp2"] |= {"samples": 2}
    path.write_text(yaml.safe_dump({"tasks": tasks}))
    return path


def command(folder, suite, out, *more, steps=(1, 2)):
    adapters = [str(folder / "run" / f"checkpoint-{step}") for step in steps]
    words = ["eval", str(folder / "model"), "--adapter", *adapters, "--max_tokens", "4", "--out", str(out)]
    return [*words, *(["--suite", str(suite)] if suite else []), *more]


def test_a_suite_on_two_checkpoints_loads_one_base_and_scores_as_each_alone(
    trained, suite, tmp_path, capsys, monkeypatch
):
    loaded = []
    load = decide.load_model
    monkeypatch.setattr(decide, "load_model", lambda *a, **k: loaded.append(1) or load(*a, **k))
    assert main(command(trained, suite, tmp_path / "both")) == 0
    printed = capsys.readouterr().out
    assert loaded == [1] and printed.count("The adapter is in use") == 2
    assert "Best: checkpoint-" in printed and "average" in printed
    saved = json.loads((tmp_path / "both" / "suite.json").read_text())
    assert [one["policy"] for one in saved["policies"]] == ["checkpoint-1", "checkpoint-2"]
    assert saved["suite"] == "mine" and saved["best"] in ("checkpoint-1", "checkpoint-2")
    assert saved["policies"][0]["tasks"].keys() == LEVELS.keys()
    assert saved["policies"][0]["tasks"]["wp2"]["samples"] == 2
    assert main(command(trained, suite, tmp_path / "alone", steps=(2,))) == 0
    for name in LEVELS:
        alone = (tmp_path / "alone" / name / "completions.jsonl").read_text()
        assert (tmp_path / "both" / "checkpoint-2" / name / "completions.jsonl").read_text() == alone
        assert (tmp_path / "both" / "checkpoint-1" / name / "completions.jsonl").read_text() != alone


def test_a_call_that_was_cut_off_goes_on_and_takes_what_is_finished(trained, suite, tmp_path, monkeypatch):
    calls, at = [], 3
    generate = PortableEngine.generate

    def counted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(PortableEngine, "generate", counted)
    assert main(command(trained, suite, tmp_path / "out")) == 130
    assert (tmp_path / "out" / "checkpoint-1" / "wp2" / "result.json").exists()
    assert not (tmp_path / "out" / "suite.json").exists()
    at = 0
    assert main(command(trained, suite, tmp_path / "out")) == 0
    assert len(calls) == 3 + 2, "the two of the second checkpoint"
    assert main(command(trained, suite, tmp_path / "out")) == 0
    assert len(calls) == 5, "all are finished"


def test_a_finished_one_with_other_settings_is_refused_before_anything_is_loaded(
    trained, suite, tmp_path, capsys, monkeypatch
):
    assert main(command(trained, suite, tmp_path / "out", steps=(1,))) == 0
    monkeypatch.setattr(decide, "load_model", lambda *_, **__: pytest.fail("loaded"))
    assert main(command(trained, suite, tmp_path / "out", "--seed", "1", steps=(1,))) == 2
    assert "holds a finished evaluation with seed 0, not 1" in " ".join(capsys.readouterr().err.split())


def test_tasks_that_cannot_be_loaded_are_named_in_one_sentence_before_anything_is_loaded(
    trained, suite, tmp_path, capsys, monkeypatch
):
    tasks = yaml.safe_load(suite.read_text())["tasks"]
    tasks |= {"mine": {"task": f"jsonl:{tmp_path}/none.jsonl"}, "other": {"task": "gsm9k"}}
    suite.write_text(yaml.safe_dump({"tasks": tasks}))
    monkeypatch.setattr(decide, "load_model", lambda *_, **__: pytest.fail("loaded"))
    assert main(command(trained, suite, tmp_path / "out")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "mine of the suite mine cannot be loaded, nor can other, so nothing is scored: " in said
    assert "none.jsonl" in said


def test_adapters_of_another_shape_are_loaded_anew(trained, tmp_path):
    model = add_lora(base(trained), rank=2, alpha=8, dropout=0.0)
    move_adapter(model).save_pretrained(tmp_path / "run" / "checkpoint-3")
    words = command(trained, None, tmp_path / "out", "--task", "arithmetic", "--limit", "2", steps=(1,))
    words.insert(words.index("--max_tokens"), str(tmp_path / "run" / "checkpoint-3"))
    assert main(words) == 0
    saved = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert [list(one["tasks"]) for one in saved["policies"]] == [["arithmetic"]] * 2
    assert (tmp_path / "out" / "checkpoint-3" / "result.json").exists()


def test_what_contradicts_is_refused(trained, suite, tmp_path, capsys):
    refused = {
        "either --suite, or --task": command(trained, suite, tmp_path / "out", "--task", "gsm8k"),
        "given more than once": command(trained, suite, tmp_path / "out", steps=(1, 1)),
        "No task is given": command(trained, None, tmp_path / "out"),
    }
    for message, words in refused.items():
        assert main(words) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_checkpoints_of_runs_on_different_tasks_need_a_task(trained, tmp_path, capsys):
    for step in (1, 2):
        shutil.copytree(trained / "run" / f"checkpoint-{step}", tmp_path / f"r{step}")
        (tmp_path / f"r{step}" / "config.yaml").write_text(
            f"task: arithmetic\ntask_options: {{level: wp{step}, test_size: 2}}\nmodel: m\n"
        )
    words = ["eval", str(trained / "model"), "--adapter", str(tmp_path / "r1"), str(tmp_path / "r2")]
    assert main(words) == 2
    assert "were trained on different tasks" in " ".join(capsys.readouterr().err.split())


def test_an_adapter_that_is_exchanged_is_the_one_that_is_scored(trained):
    """Its logits are those of the adapter loaded by itself."""
    first, second = (trained / "run" / f"checkpoint-{step}" for step in (1, 2))
    model = load_adapter(base(trained), first)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        exchange_adapter(model, second)
        after = model(input_ids=ids).logits
        alone = load_adapter(base(trained), second)(input_ids=ids).logits
    assert not torch.equal(before, after) and torch.equal(after, alone)


def test_a_policy_of_conversations_is_scored_in_conversations_and_its_base_too(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained / "run" / "checkpoint-1", run)
    options = {"level": "wp1", "examples": 0, "test_size": 2}
    settings = {"task": "arithmetic", "task_options": options, "environment": "calculator", "tools": []}
    (run / "config.yaml").write_text(yaml.safe_dump(settings | {"max_completion_length": 8}))
    model = str(trained / "model")
    assert main(["eval", model, "--adapter", str(run), "--out", str(tmp_path / "a")]) == 0
    assert "environment calculator" in " ".join(capsys.readouterr().out.split())
    words = ["--task", "arithmetic", "--task_options", json.dumps(options), "--max_tokens", "8"]
    assert main(["eval", model, *words, "--environment", "calculator", "--out", str(tmp_path / "b"),
                 "--max_tool_calling_iterations", "1"]) == 0  # fmt: skip
    assert main(["eval", model, *words, "--out", str(tmp_path / "c")]) == 0
    for name in "abc":
        result = json.loads((tmp_path / name / "result.json").read_text())
        turns = result["source"].get("turns")
        assert (turns and turns["max_tool_calling_iterations"]) == {"a": None, "b": 1, "c": None}[name]
        assert (turns is None) == (name == "c")
        row = json.loads((tmp_path / name / "completions.jsonl").read_text().splitlines()[0])
        assert isinstance(row["completion"], str if name == "c" else list)
    capsys.readouterr()
    own = ["eval", model, "--adapter", str(run), "--task", "guess_number", "--limit", "1"]
    assert main(own) == 0
    assert "environment" not in capsys.readouterr().out, "the environment is that of the run's own task"
