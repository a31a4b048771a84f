"""What docs/training.md shows as a recipe trains; `test_judge_and_programs` has its judge and programs."""

import json
from pathlib import Path

import pytest
import yaml

from qerl.cli import main
from qerl.run_folder import read_metrics
from qerl.tasks import get_task
from qerl.trainer.prompts import sound_prompts
from tests.support.agents import tool_tokenizer
from tests.support.training_page import shown

pytestmark = pytest.mark.slow


@pytest.fixture
def run_shown(tiny_run, tmp_path, monkeypatch):
    """``run_shown(heading, **changes)``: the logs of a run of the page's recipe on a tiny model."""
    (tmp_path / "my").mkdir()
    lines = [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(12)]
    (tmp_path / "my" / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)

    def run(heading, **changes):
        short = {"max_steps": 3, "eval_steps": 3, "noise_stages": 3, "save_strategy": "no"}
        fields = tiny_run(tmp_path / "run", **short | changes)
        Path("tiny.yaml").write_text(yaml.safe_dump(fields))
        Path("shown.yaml").write_text(shown(heading))
        assert main(["train", "tiny.yaml", "shown.yaml"]) == 0
        return read_metrics(tmp_path / "run")

    return run


def write_shown(heading):
    """The page's Python under a heading, as the file that its first line names."""
    lines = shown(heading, "python")
    Path(lines.partition("\n")[0].removeprefix("# ")).write_text(lines)


def test_a_table_of_your_own(tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "table.csv").write_text(
        'task,solution,level\n"What is 7 x 6, and why?",42,1\n2 + 2?,4,2\n'
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(shown("Your own data and rewards", "python"), names)
    rows = get_task("jsonl:my/problems.jsonl").train()
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert asked == ["What is 7 x 6, and why?", "2 + 2?"] and rows["answer"] == ["42", "4"]
    for row, content in zip(sound_prompts(names["train_dataset"], "train_dataset"), asked, strict=True):
        assert row["prompt"] == [{"role": "user", "content": content}]
    assert rows["level"] == [1, 2]


def test_a_tool(run_shown, tiny_model, tmp_path):
    write_shown("A tool")
    tool_tokenizer().save_pretrained(tmp_path / "model")
    tiny_model(max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    rows = [row for row in run_shown("A tool") if "loss" in row]
    assert [row["tools/call_frequency"] for row in rows] == [0.0] * 3


def test_an_environment(run_shown):
    write_shown("An environment")
    rows = run_shown("An environment", task_options={}, max_completion_length=60, temperature=2.0)
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 3
    assert all("rewards/HigherLower/mean" in row and row["rollout/turns"] >= 1 for row in steps)
    assert any("eval_rewards/HigherLower/mean" in row for row in rows)


def test_several_tasks(run_shown):
    rows = run_shown("Several tasks", eval_samples=6)
    names = {name for row in rows for name in row}
    for part in ("words", "mine"):
        assert {f"rewards/accuracy/task_{part}", f"eval_rewards/accuracy/task_{part}"} <= names


def test_a_curriculum(run_shown):
    rows = run_shown("A curriculum", eval_strategy="no", max_steps=6)
    assert rows[1]["curriculum/passed_over"] == 0.0
    assert any(row.get("curriculum/settled", 0) > 0 for row in rows)


def test_a_task_of_your_own(run_shown, tmp_path):
    (tmp_path / "my" / "doubles.py").write_text(shown("A task of your own", "python", under=20))
    rows = run_shown("A task of your own")
    assert any("eval_rewards/accuracy/mean" in row for row in rows)


def test_losses_of_your_own(tiny_model, tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path)
    lines = shown("Losses of your own", "python", under=20)
    pair = ([5, 6, 7], [8, 9, 10])
    lines = lines.replace("    driver.forward_backward", "    output = driver.forward_backward")
    lines = lines.replace(
        "    optimizer.step()", "    print(output.metrics['loss:sum'])\n    optimizer.step()"
    )
    exec(lines, {"name": tmp_path, "pairs": [pair] * 12})
    losses = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] - 1.0
