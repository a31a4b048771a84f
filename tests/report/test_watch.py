"""A run is followed in a terminal: what is shown of it, when it changes, and how that ends."""

import io
import json
import os

import pytest
from rich.console import Console

from qerl import cli
from qerl.errors import QeRLError
from qerl.report.watch import look, render, watch
from qerl.run_folder import CONFIG_FILE, METRICS_FILE, append_metrics, table_path
from tests.report.test_completions import HOSTILE, answers, keep

NOW = 1_000_000.0


@pytest.fixture
def run(tmp_path):
    """A run of 100 steps that has done two, ten seconds ago."""
    rows = [{"step": 0, "max_steps": 100, "update_path": {}}]
    rows += [
        {"step": step, "reward": step / 10, "rewards/accuracy/mean": 0.25, "step_time": 30.0}
        for step in (1, 2)
    ]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / CONFIG_FILE).write_text("num_generations: 2\n")
    os.utime(tmp_path / METRICS_FILE, (NOW - 10, NOW - 10))
    return tmp_path


def settled(run, step, rows):
    keep(run, step, rows)
    os.utime(table_path(run, step), (NOW, NOW))


def screen(view, width=100):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(view, NOW, width))
    return console.file.getvalue()


def terminal():
    return Console(file=io.StringIO(), width=100, height=50, force_terminal=True)


def test_progress_metrics_curve_and_the_latest_completions_are_shown(run):
    settled(run, 1, answers([0.5, 0.5]))
    settled(run, 2, answers([0.0, 0.0, 1.0, 0.25]))
    text = screen(look(run))
    assert "step 2 of 100, 30 s per step, about 0:49:00 left, last logged 0:00:10 ago" in text
    assert "Accuracy of samples" in text and "25" in text
    (heads,) = [line for line in text.splitlines() if "mean, last tenth" in line]
    (accuracy,) = [line for line in text.splitlines() if "Accuracy of samples" in line]
    assert heads.split() == ["last", "mean,", "last", "tenth"] and accuracy.split()[3:] == ["25", "25", "%"]
    assert [accuracy.index("25"), accuracy.rindex("25")] == [heads.index("last"), heads.index("mean")]
    assert "0.2 \u2524" in text and "0.1 \u2524" in text, "the axis of the reward's curve"
    order = ["step 2, best completion, reward 1", "What is 1 + 1?", "answer 2 of reward 1.0", "step 2, worst"]
    places = [text.index(words) for words in order]
    assert places == sorted(places) and text.index("answer 1 of reward 0.0") > places[-1]
    assert "answer 3" not in text and "0.5" not in text


def test_a_run_that_has_not_logged_a_step_is_waited_for(run):
    (run / METRICS_FILE).unlink()
    assert "waiting for the first step" in screen(look(run))
    append_metrics(run, {"step": 0, "max_steps": 100})
    assert "step 0 of 100, waiting for the first step" in screen(look(run))


@pytest.mark.parametrize(("steps", "word"), [(100, "finished"), (7, "ended")])
def test_a_run_is_followed_to_its_end(run, monkeypatch, steps, word):
    def train_on(_):
        reached = max(json.loads(line)["step"] for line in (run / METRICS_FILE).read_text().splitlines())
        if reached < steps:
            append_metrics(run, {"step": steps, "reward": 0.5})
        else:
            append_metrics(run, {"step": steps, "train_runtime": 1.0})

    console = terminal()
    monkeypatch.setattr("time.sleep", train_on)
    watch(run, console)
    assert f"step {steps} of 100, {word}" in console.file.getvalue()


def test_ctrl_c_ends_it_with_status_0_and_leaves_what_was_shown(run, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    console = terminal()
    monkeypatch.setattr(cli, "console", console)
    monkeypatch.setattr("time.sleep", interrupted)
    assert cli.main(["watch", str(run)]) == 0
    leaves_screen = "\x1b[?1049l"
    assert "step 2 of 100" in console.file.getvalue().partition(leaves_screen)[2]


def test_without_a_terminal_it_is_shown_once(run, capsys):
    assert cli.main(["watch", str(run)]) == 0
    assert capsys.readouterr().out.count("step 2 of 100") == 1


def test_a_folder_without_a_run_is_a_sentence(tmp_path):
    with pytest.raises(QeRLError, match=r"holds no run \(neither metrics\.jsonl nor config\.yaml\)"):
        look(tmp_path)


def test_files_are_read_when_they_change(run, monkeypatch):
    settled(run, 1, answers([0.0, 1.0]))
    first = look(run)
    assert (look(run, first).run, look(run, first).table) == (first.run, first.table)
    append_metrics(run, {"step": 3, "reward": 0.9})
    keep(run, 2, answers([1.0, 1.0]))  # just now: it may be half written
    second = look(run, first)
    assert second.run.rows[-1]["step"] == 3 and second.table is first.table
    os.utime(table_path(run, 2), (NOW, NOW))
    assert look(run, second).table.step == 2


def test_nothing_that_a_model_writes_reaches_the_terminal_as_a_command(run):
    rows = answers([1.0, 0.0])
    for row in rows:
        row["completion"] = [
            {"role": HOSTILE, "content": HOSTILE + "[red]x[/red]"},
            {"role": "tool", "content": HOSTILE},
        ]
    settled(run, 2, rows)
    text = screen(look(run), 500)
    assert not set(text) & {"\x1b", "\x00", "\x85", "\u202e"}
    assert "\u241b[2J" in text and "[red]x[/red]" in text


def test_long_completions_and_narrow_terminals_fit(run):
    rows = answers([1.0, 0.0])
    for row in rows:
        row["completion"] = [{"role": "assistant", "content": "word " * 100_000}]
    settled(run, 2, rows)
    text = screen(look(run), 40)
    assert len(text.splitlines()) < 120 and max(map(len, text.splitlines())) <= 40
