"""What the tests of `lab.trained` share: a folder of runs of a tiny model, and result files of runs."""

import json
from pathlib import Path

import pytest

from lab.audit import raw
from lab.trained import runs

_READERS = ("bench.result", "lab.audit.raw")
"""Modules that know where results lie."""


@pytest.fixture
def folder(tiny_model, tiny_tokenizer, tmp_path):
    model = tmp_path / "model"
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    (tmp_path / "runs").mkdir()
    return runs.Folder(tmp_path, model, tmp_path / "models")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Writes the result file of a name, from its rows, where pages and audit read them; none is there yet."""
    for where in _READERS:
        monkeypatch.setattr(f"{where}.RESULTS", tmp_path)
    raw.read.cache_clear()
    shared = {"gpu": "NVIDIA H200", "commit": "abcdef0", "date": "2026-11-28 21:00 UTC", "held_out": 1024}

    def write(name, rows):
        Path(tmp_path / f"{name}.json").write_text(json.dumps({**shared, "rows": rows}))
        raw.read.cache_clear()

    yield write
    raw.read.cache_clear()
