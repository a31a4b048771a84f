"""`qerl compare`: the settings that differ and what came of them, in the terminal."""

import json

from qerl.cli import main
from tests.report.test_page import make_run


def lines(capsys):
    return [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]


def scored(run, accuracy):
    folder = run / "eval"
    folder.mkdir()
    result = {
        "task": "gsm8k", "problems": 100, "samples": 1, "accuracy": accuracy,
        "interval": [accuracy - 0.1, accuracy + 0.1], "source": {"adapter": str(run)},
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
    assert "learning_rate 1e-05 0.0001" in said and "noise default true" in said
    assert not any(line.startswith("model ") for line in said), "the same in both"
    assert "Steps 20 10" in said
    assert "Reward 0.975 1" in said, "means of the last two steps, and of the last one"
    assert "gsm8k, accuracy, 100 problems 50.0 (40.0 to 60.0) -" in said


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
    assert main(["report", str(own), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Accuracy of samples" not in page and "Reward" in page
