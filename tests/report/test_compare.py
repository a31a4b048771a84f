"""`qerl compare`: the settings that differ and what came of them, in the terminal."""

import json

import pytest
from rich.console import Console

from qerl.cli import main
from qerl.report.compare import compare
from qerl.report.page import completed, differing
from qerl.settings.recipe import dump, load_config, resolved
from tests.report.test_page import make_run


def lines(capsys):
    return [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]


def scored(run, accuracy, folder=None, **more):
    folder = folder or run / "eval"
    folder.mkdir()
    result = {
        "task": "gsm8k", "problems": 100, "samples": 1, "accuracy": accuracy,
        "interval": [accuracy - 0.1, accuracy + 0.1], "source": {"adapter": str(run)}, **more,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))


def test_settings_metrics_and_scores_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shared = {"model": "m", "output_dir": "x"}
    a = make_run(tmp_path / "a", 20, shared | {"learning_rate": 1e-5}, reward=lambda step: step / 20)
    b = make_run(tmp_path / "b", 10, shared | {"learning_rate": 1e-4, "noise": True})
    scored(a, 0.5)
    assert main(["compare", str(a), str(b)]) == 0
    said = lines(capsys)
    assert "learning_rate 1e-05 0.0001" in said and "noise false true" in said
    assert not any(line.startswith("model ") for line in said), "the same in both"
    assert "Steps 20 10" in said
    assert "Reward 0.975 1" in said, "means of the last two steps, and of the last one"
    assert "gsm8k, accuracy, 100 problems 50.0 (40.0 to 60.0) -" in said


def test_runs_differ_only_in_values_that_are_not_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    fields = {"model": "m", "task": "arithmetic", "output_dir": "x", "learning_rate": 1e-5}
    third = {"max_grad_norm": 1.0, "task_options": {"level": "wp1"}}
    said = {"a": {"loss_type": "grpo"}, "b": {}, "c": third}
    runs = []
    for name, more in said.items():
        runs.append(make_run(tmp_path / name, 2))
        (runs[-1] / "config.yaml").write_text(dump(load_config([], fields | more)))
    assert main(["compare", *map(str, runs)]) == 0
    said = lines(capsys)
    start = next(at for at, line in enumerate(said) if line.startswith("┡"))
    assert set(said[start + 1 : next(at for at, line in enumerate(said) if line.startswith("└"))]) == {
        "task_options.level default default wp1",
        "loss_type grpo dppo_kl dppo_kl",
        "epsilon 0.2 0.05 0.05",
        "epsilon_high 0.2 0.05 0.05",
        "delta null 20.0 20.0",
        "use_rollout_logprobs false true true",
    }
    main(["report", *map(str, runs), "--out", str(tmp_path / "page.html")])
    assert "scale_rewards" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        ({"beta": 0.0, "seed": 42, "adapter": None, "lr_scheduler_type": "linear"}, {}, {}),
        ({"seed": 42, "loss_type": "dppo_kl"}, {"seed": 1}, {"seed": ["42", "1"]}),
        ({"top_p": 0.9}, {"min_p": 0.1}, {"top_p": ["0.9", "1.0"], "min_p": ["null", "0.1"]}),
        ({"task_options": {}}, {"task_options.level": "wp1"}, {"task_options.level": ["default", "wp1"]}),
        ({}, {"of_an_old_version": 3}, {"of_an_old_version": ["default", "3"]}),
        ({}, {"output_dir": "x"}, {}),
    ],
)
def test_a_field_that_one_file_leaves_out_has_its_default(one, other, rows):
    of_both = {"loss_type": "dppo_kl"}
    assert differing(completed([of_both | one, of_both | other])) == rows


def test_settings_that_a_file_names_are_kept():
    one = resolved(load_config(["demo"], {}))
    assert all(full[key] == one[key] for full in completed([one, {"seed": 1}, {}])[:1] for key in one)
    assert completed([one]) == [one] and completed([]) == []


def test_scores_of_other_policies_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    a = make_run(tmp_path / "a", 2)
    scored(a, 0.5)
    scored(a, 0.3, tmp_path / "base", source={"model": "some/base"})
    assert main(["compare", str(a), "--scores", str(tmp_path / "base")]) == 0
    assert "some/base: 30.0 (20.0 to 40.0) of gsm8k, accuracy, 100 problems" in lines(capsys)


def test_scores_that_were_sampled_otherwise_are_not_in_one_row(tmp_path, capsys):
    a, b, c = (make_run(tmp_path / name, 2) for name in "abc")
    scored(a, 0.5, settings={"max_tokens": 256, "temperature": 0.0, "seed": 0})
    scored(b, 0.7, settings={"max_tokens": 4096, "temperature": 0.0, "seed": 1})
    scored(c, 0.6, settings={"max_tokens": 4096, "temperature": 0.0, "seed": 2})
    compare([a, b, c], Console(width=140))
    said = lines(capsys)
    assert "gsm8k, accuracy, 100 problems, max_tokens 256 50.0 (40.0 to 60.0) - -" in said
    last = "gsm8k, accuracy, 100 problems, max_tokens 4096 - 70.0 (60.0 to 80.0) 60.0 (50.0 to 70.0)"
    assert last in said


def test_a_run_without_steps_waits(tmp_path, capsys):
    a = make_run(tmp_path / "a", 1)
    (a / "metrics.jsonl").write_text("")
    assert main(["compare", str(a)]) == 2
    assert "wait for the first step" in capsys.readouterr().err


def test_accuracy_that_judges_nothing_is_left_out(tmp_path, capsys):
    never = {"rewards/accuracy/mean": lambda step: 0.0}
    own = make_run(tmp_path / "own", settings={"reward_files": ["r.py:f"]}, **never)
    assert main(["compare", str(own)]) == 0
    assert not any("Accuracy of samples" in line for line in lines(capsys))
    wrong = make_run(tmp_path / "wrong", settings={"model": "m"}, **never)
    assert main(["compare", str(wrong)]) == 0
    assert any("Accuracy of samples, % 0" in line for line in lines(capsys)), "it is the reward, and is 0"
    added = make_run(tmp_path / "added", settings={"task": "gsm8k", "reward_files": ["r.py:f"]}, **never)
    assert main(["compare", str(added)]) == 0
    said = lines(capsys)
    assert any("Accuracy of samples, % 0" in line for line in said), "its answers judge beside the other"
    assert main(["report", str(own), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Accuracy of samples" not in page and "Reward" in page
