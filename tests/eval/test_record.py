"""An evaluation on disk: kept as it goes, gone on with, never overwritten."""

import json

import pytest
from rich.console import Console

from qerl.errors import QeRLError
from qerl.eval.evaluate import evaluate, held_out
from qerl.eval.record import COMPLETIONS_FILE, SETTINGS_FILE, Record
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.run_folder import RESULT_FILE
from qerl.tasks import get_task

PARAMS = SamplingParams(max_tokens=4, temperature=1.0, seed=3)


class Interrupted(PortableEngine):
    """Ctrl-C comes in the given call."""

    calls = 0
    at = 0

    def generate(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().generate(*args, **kwargs)


@pytest.fixture
def run(tiny_model, tiny_tokenizer):
    """``run(folder, at=0, rows=4)``: 10 problems, 2 samples each, slices of ``rows`` completions."""
    model, task = tiny_model("llama"), get_task("arithmetic", test_size=10, examples=0)

    def call(folder, at=0, rows=4, settings=None):
        engine = Interrupted(model, 0, max_sequences=rows)
        engine.at = at
        record = Record(folder, settings or {"temperature": 1.0, "seed": 3})
        result = evaluate(
            engine, tiny_tokenizer, task, held_out(task), samples=2, params=PARAMS,
            console=Console(quiet=True), record=record,
        )  # fmt: skip
        return result, engine.calls

    return call


def test_an_evaluation_that_was_cut_off_goes_on_to_the_same_result(run, tmp_path):
    whole, calls = run(tmp_path / "whole")
    assert calls == 5
    part = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        run(part, at=4)
    kept = (part / COMPLETIONS_FILE).read_text()
    assert kept.count("\n") == 12 and not (part / RESULT_FILE).exists()
    (part / COMPLETIONS_FILE).write_text(kept + kept.splitlines()[0] + '\n{"prompt": "cut o')
    again, calls = run(part, rows=64)
    assert calls == 2, "in the slices that it began with"
    assert (part / COMPLETIONS_FILE).read_text() == (tmp_path / "whole" / COMPLETIONS_FILE).read_text()
    assert again.accuracy == whole.accuracy and again.mean_tokens == whole.mean_tokens
    assert {path.name for path in part.iterdir()} == {RESULT_FILE, COMPLETIONS_FILE}


def test_a_problem_draws_the_same_in_slices_of_any_size(run, tmp_path):
    files = [tmp_path / name / COMPLETIONS_FILE for name in ("few", "many")]
    calls = [run(file.parent, rows=rows)[1] for file, rows in zip(files, (4, 64), strict=True)]
    assert calls == [5, 1]
    assert files[0].read_text() == files[1].read_text()


def test_other_settings_and_finished_ones_are_refused(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, at=2)
    with pytest.raises(QeRLError, match=r"with temperature 1\.0, not 0\.5"):
        run(tmp_path, settings={"temperature": 0.5, "seed": 4})
    run(tmp_path)
    before = (tmp_path / RESULT_FILE).read_bytes()
    with pytest.raises(QeRLError, match="finished evaluation"):
        run(tmp_path)
    assert (tmp_path / RESULT_FILE).read_bytes() == before


def test_settings_without_a_completion_are_replaced(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, at=1)
    assert (tmp_path / SETTINGS_FILE).exists()
    assert run(tmp_path, settings={"seed": 4})[0].problems == 10


def test_completions_that_nothing_describes_are_left_alone(run, tmp_path):
    (tmp_path / COMPLETIONS_FILE).write_text(json.dumps({"mine": 1}) + "\n")
    with pytest.raises(QeRLError, match=f"{SETTINGS_FILE} beside it is missing or damaged"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("completions", "settings", "message"),
    [
        ('{"right": true}', '{"problems_at_a_time": 0}', SETTINGS_FILE),
        ('{"right": true}', '{"problems_at_a_time": "x"}', SETTINGS_FILE),
        ('{"right": true}', "[]", SETTINGS_FILE),
        ('{"right": true}', "[" * 100_000, SETTINGS_FILE),
        ("3", '{"problems_at_a_time": 2}', "no scored completion"),
        ('{"right": true}', '{"problems_at_a_time": 2}', "no scored completion"),
        ("[" * 100_000, "{}", "is damaged"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path, completions, settings, message):
    (tmp_path / COMPLETIONS_FILE).write_text(completions + "\n")
    (tmp_path / SETTINGS_FILE).write_text(settings)
    with pytest.raises(QeRLError, match=message):
        Record(tmp_path, {})


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(QeRLError, match="cannot be written"):
        Record(tmp_path / "file" / "out", {})
