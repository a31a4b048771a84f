"""The tables of drafts say what their results hold."""

import json

import pytest

from lab.writers import draft_tables

HEAD = {"commit": "abcdef0", "date": "2026-11-23 05:00 UTC", "command": "python -m bench drafts"}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.result.RESULTS", tmp_path)
    cost = [
        {
            "shape": "7b", "lora_rank": 32, "prompt_tokens": 64, "decode_tokens": 256, "batch": rows,
            "draft": draft, "pass_ms": ms, "spread": 0.01 * rows,
        }
        for draft, rows, ms in [(0, 1, 2.0), (0, 4, 2.0), (3, 1, 2.5), (3, 4, 1.9)]
    ]  # fmt: skip
    won = {
        "task": "text", "sources": "own and siblings", "match": 1, "draft": 3, "entropy": 1.5, "tokens": 90,
        "completions": 30, "accepted_share": 0.25, "tokens_per_pass": 1.5,
    }  # fmt: skip
    others = [won | {"match": 2}, won | {"sources": "own"}]
    for name, found in (("cost", cost), ("won", [*others, won])):
        shared = {**HEAD, "gpu": "NVIDIA H200", "machine": "2 CPU cores", "rows": found}
        (tmp_path / f"{name}.json").write_text(json.dumps(shared))


def test_what_passes_cost_stands_by_rows_and_length(results):
    lines = draft_tables.cost("cost").splitlines()
    assert lines[0] == "| sequences; ms a pass | none | drafts of 3 |"
    assert lines[2:4] == ["| 1 | 2.00 | 2.50 |", "| 4 | 2.00 | 1.90 |"]
    assert "differ by up to 4 %" in lines[-1]


def test_what_drafts_win_is_divided_by_what_they_cost(results):
    """A pass with drafts that seems to be faster counts as one without."""
    lines = draft_tables.speed("won", "cost").splitlines()
    assert lines[2:-2] == ["| explanations and stories | 1.50 | 3 | 3 | 25 % | 1.50 | 1.20 | 1.50 |"]
