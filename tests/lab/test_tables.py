"""Tables and numbers of README and docs are those of bench/results."""

import json
import re

import pytest

import bench.result
from bench.result import RESULTS, read_rows
from lab.__main__ import main
from lab.writers import step_times, tables
from lab.writers.figures import NUMBERS, TABLES
from qerl.errors import QeRLError
from qerl.settings.groups import sentence_of


@pytest.mark.slow
def test_pages_hold_what_the_results_say():
    assert [page.name for page in tables.outdated()] == [], "run: python -m lab tables"


def test_every_table_and_number_stands_in_a_page():
    text = "".join(page.read_text() for page in tables.PAGES)
    assert {name for name in TABLES if f"<!-- table {name} -->" not in text} == set()
    assert {name for name in NUMBERS if f"<!-- number {name} -->" not in text} == set()


def test_the_newest_decoding_of_a_card_is_shown_with_its_commit(monkeypatch, tmp_path):
    for file in RESULTS.glob("rollout-*.json"):
        content = json.loads(file.read_text())
        if file.stem == "rollout-7b-all-h200":
            newest = content["rows"][0] | {"batch": 12, "decode_tok_s": 5432.1, "decode_tokens": 96}
            content |= {"commit": "0123abc", "rows": [newest]}
        (tmp_path / file.name).write_text(json.dumps(content))
    monkeypatch.setattr(bench.result, "RESULTS", tmp_path)
    said = TABLES["decode"]()
    assert "| 7B, 12 | | | | 5432 | |" in said and "0123abc" in said


def test_the_first_screen_is_of_one_card_and_of_the_best_that_stands_beside(monkeypatch, tmp_path):
    rate = {"engine": "qerl", "weights": "nvfp4", "decode_tok_s": 900.0}
    dense, theirs = rate | {"weights": "bf16", "decode_tok_s": 500.0}, rate | {"decode_tok_s": 400.0}
    theirs |= {"engine": "vllm-humming", "version": "vllm 0.33.0"}
    slower = theirs | {"engine": "vllm-bf16", "weights": "bf16", "decode_tok_s": 300.0}
    step = {"engine": "qerl", "weights": "nvfp4", "total_s": 7.0}
    trl = {"engine": "trl+vllm", "weights": "bf16", "total_s": 33.0, "version": "trl 1.16.0, vllm 0.24.0"}
    monkeypatch.setattr(bench.result, "RESULTS", tmp_path)

    def write(name, gpu, date, rows):
        (tmp_path / f"{name}.json").write_text(json.dumps({"gpu": gpu, "date": date, "rows": rows}))

    def lines(*rows, gpu="NVIDIA H200"):
        both = [row | {"batch": batch} for row in rows for batch in (1, 64)]
        write("rollout-7b-vllm-h200", "NVIDIA H200", "2026-11-24", both)
        write("step-7b-lognormal-trl-h200", gpu, "2026-11-21", [step, trl])
        return TABLES["first-screen"]().splitlines()

    assert lines(rate, dense)[2:6] == [
        "| GRPO step, 7B, 128 samples of drawn lengths | **7.0 s** "
        "| 33.0 s (TRL 1.16 with vLLM 0.24, 16-bit) |",
        "| Decoding, 7B, 1 sequence | **900 tokens/s** | 500 tokens/s (ours, 16-bit) |",
        "| Decoding, 7B, 64 sequences | **900 tokens/s** | 500 tokens/s (ours, 16-bit) |", "",
    ]  # fmt: skip
    found = lines(rate, dense, slower, theirs)
    assert found[4].endswith("| 400 tokens/s (vLLM 0.33, NVFP4) |")
    assert found[-1].startswith("Random weights, measured 2026-11-21 to 2026-11-24.")
    with pytest.raises(ValueError, match="too many values"):
        lines(rate, dense, gpu="NVIDIA H100")


def test_a_changed_number_is_written_anew():
    sentence = "It takes <!-- number demo-minutes -->1 minute<!-- / -->.\n"
    page = f"{sentence}\n<!-- table demo -->\nold\n<!-- /table -->\n"
    written = tables.render(page)
    assert "1 minute<" not in written and "old" not in written
    assert "| seed |" in written and written.endswith("<!-- /table -->\n")
    assert tables.render(written) == written


def test_a_result_that_a_table_refuses_is_told(monkeypatch, tmp_path, capsys):
    def refuses():
        raise QeRLError("1 of 2 runs failed.")

    page = tmp_path / "page.md"
    page.write_text("<!-- table serve-learning -->\n<!-- /table -->\n")
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setitem(TABLES, "serve-learning", refuses)
    assert main(["tables", "--check"]) == 2
    assert capsys.readouterr().err == "error: 1 of 2 runs failed.\n"


def test_a_field_says_what_its_result_says():
    auto, fp8 = (row["gradient_error"] for row in read_rows("parity-backward-smollm2-h200"))
    assert f"off by {fp8:.2f} of their norm in place of {auto:.2f}" in sentence_of("backward_dtype")


def test_a_plan_tells_the_time_by_steps_as_they_are_unless_asked(monkeypatch, tmp_path):
    content = json.loads((RESULTS / "step-7b-backward-h200.json").read_text())
    (plain,) = (row for row in content["rows"] if "backward_dtype" not in row)
    content["rows"].append(plain | {"max_staleness": 2, "update_s": 0.5})
    otherwise = {"backward_dtype", "max_staleness"}
    content["rows"].sort(key=lambda row: bool(otherwise & row.keys()))  # of equal steps the last one counts
    (tmp_path / "step-7b-backward-h200.json").write_text(json.dumps(content))
    for module in (bench.result, step_times):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    (found,) = json.loads(step_times.step_times())
    assert found["update_s"] == round(content["rows"][0]["update_s"], 2)


@pytest.mark.parametrize("name", ["unheard", "un-0.1"])
def test_a_mark_without_a_table_or_number_is_an_error(name):
    with pytest.raises(KeyError, match=name):
        tables.render(f"<!-- table {name} -->\n<!-- /table -->\n")
    with pytest.raises(KeyError, match=name):
        tables.render(f"It takes <!-- number {name} -->1<!-- / --> s.\n")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_every_result_says_where_it_comes_from(file):
    rows = read_rows(file.stem)
    assert rows
    for row in rows:
        assert {"commit", "date", "command"} <= row.keys() and row.keys() & {"gpu", "machine"}
        assert re.fullmatch(r"[0-9a-f]{7}(-dirty)?", row["commit"])
        assert "note" in row or not row["commit"].endswith("-dirty"), "what was changed must be said"
        assert re.fullmatch(r"2\d{3}-\d\d-\d\d( \d\d:\d\d UTC)?", row["date"])
    assert not re.search(r"[\s\"]/(tmp|home|root|work)/", file.read_text()), "a path of one machine"
