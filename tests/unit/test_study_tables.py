"""The docs' tables of studies."""

import pytest
from rich.console import Console

from bench import study_tables
from qerl.study.results import write_results
from qerl.study.runner import Runner
from qerl.study.store import Store
from tests.support.study import FakeMake, tiny_study


@pytest.fixture
def name(tmp_path, monkeypatch):
    """A study among the results."""
    store = Store(
        tmp_path / "x", tiny_study(comparisons={"primary": [["aqn", "none"]], "other": [["none", "aqn"]]})
    )
    assert Runner(store, FakeMake(), Console(quiet=True)).run()
    monkeypatch.setattr(study_tables, "RESULTS", tmp_path)
    write_results(store.results(), tmp_path / "tiny.json.gz")
    study_tables.study.cache_clear()
    study_tables.compared.cache_clear()
    return "tiny"


def test_arms_have_their_rate_and_their_spread(name):
    lines = study_tables.arms(name).splitlines()
    assert lines[2].startswith("| none | 0.0002 | 0.000 | 0.200 (0.000) | 0.400 (0.000) | 0 of 3 | 0 |")
    assert lines[3].startswith("| aqn | 0.0002 | 0.000 | 0.243")
    assert lines[-1] == "m on arithmetic {}: 14 runs of 4 steps, fake. File: tiny.json.gz."


def test_comparisons_of_the_families_that_are_named(name):
    pytest.importorskip("scipy")
    lines = study_tables.comparisons(name, "primary").splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| aqn \N{MINUS SIGN} none | +0.043 | +0.0")
    assert "0 and 0 of 3" in lines[2]
