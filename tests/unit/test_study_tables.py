"""The docs' tables of studies."""

import pytest
from rich.console import Console

from bench import draw, noise_tables, probe_tables, study_tables
from bench.result import RESULTS
from qerl.study.arms import Arm
from qerl.study.probe.summary import read_rows
from qerl.study.results import Results, write_results
from qerl.study.runner import Runner
from qerl.study.store import Store
from tests.support.study import FakeMake, tiny_study

NOISE = {"noise": True, "noise_stages": 2}
ARMS = {"none": None, "aqn": NOISE, "temperature": {"match_entropy": "aqn"}, "late": None}
PAIRS = {"primary": [["aqn", "none"], ["late", "none"]], "other": [["none", "aqn"]]}


@pytest.fixture
def name(tmp_path, monkeypatch):
    """A study among the results, in which the arm `late` has not run and `none` moves its entropy."""
    study = tiny_study(arms=ARMS, comparisons=PAIRS, steps=14, learning_rates=[2e-4], tuning_seeds=0)
    store = Store(tmp_path / "x", study)
    assert Runner(store, FakeMake(), Console(quiet=True)).run()
    results = store.results()
    for run in results.of("temperature"):
        run.steps["temperature/error"] = [0.0] * 12 + [0.01 * (1 + run.run.seed), None]
        run.steps["temperature"] = [1.0] * 14
    for run in results.of("aqn"):
        run.steps["sampling/kl"] = [0.0] * 2 + [0.03] * 12
        run.steps["rollout/entropy"] = [value + 0.5 for value in run.steps["rollout/entropy"]]
    monkeypatch.setattr(study_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(probe_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(draw, "IMAGES", tmp_path / "images")
    there = [run for run in results.runs if run.run.arm.name != "late"]
    write_results(Results(study, there), tmp_path / "noise-wp12.json.gz")
    functions = study_tables.study, study_tables.compared, probe_tables.probe, probe_tables.read
    for function in functions:
        function.cache_clear()
    yield "noise-wp12"
    for function in functions:
        function.cache_clear()


def test_arms_have_their_rate_and_their_spread(name):
    lines = study_tables.arms(name).splitlines()
    assert lines[2].startswith("| none | 0.0002 | 0.000 | 0.700 (0.000) | 1.400 (0.000) | 0 of 3 | 0 |")
    assert lines[3].startswith("| aqn | 0.0002 | 0.000 | 0.852")
    assert lines[-1] == "m on arithmetic {}: 9 runs of 14 steps, fake. File: noise-wp12.json.gz."


def test_comparisons_of_the_families_that_are_named(name):
    pytest.importorskip("scipy")
    lines = study_tables.comparisons(name, "primary").splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| aqn \N{MINUS SIGN} none | +0.152 | +0.1")
    assert "0 and 0 of 3" in lines[2]
    assert lines[-1].endswith("Not run: late \N{MINUS SIGN} none.")
    assert "has no finished comparison" in study_tables.comparisons(name, "formats")


def test_every_question_has_an_answer_or_says_that_nothing_ran(name):
    pytest.importorskip("scipy")
    lines = {line.split("|")[2].strip(): line for line in noise_tables.answers().splitlines() if "|" in line}
    assert (
        "| +0.152 (+0.1" in lines["aqn \N{MINUS SIGN} none"]
        and "3 seeds: **" in lines["aqn \N{MINUS SIGN} none"]
    )
    assert lines["relative \N{MINUS SIGN} none"].count("not run") == 3
    untested = lines["temperature \N{MINUS SIGN} none"]  # no comparison of the study, so without a verdict
    assert "3 seeds | not run | not run |" in untested
    assert noise_tables.entropies().count("not run") == 3 * 6
    assert noise_tables.learned().count("not run") == 3 * 2


def test_what_the_noise_reached(name):
    pytest.importorskip("scipy")
    lines = noise_tables.reached(name).splitlines()
    assert lines[2].startswith("| aqn | 3 to 14 | 0.5 | 0.5 | 0.0300 (0.0300 to 0.0300) | 0.0300 (")
    assert "| 0.500 (0.500 to 0.500) |" in lines[2] and lines[3] == ""
    follows = noise_tables.follows().splitlines()
    assert follows[2].startswith(
        "| wp12: temperature after aqn | 0.020 (0.010 to 0.030) | +0.010 to +0.030 | 1.000"
    )


def test_an_arm_with_noise_stands_beside_the_same_one_without():
    arms = {
        "none": Arm("none"), "bf16": Arm("bf16", weights="bf16"), "bare": Arm("bare", correction="none"),
        "aqn": Arm("aqn", noise=True), "bf16_aqn": Arm("bf16_aqn", weights="bf16", noise=True),
        "logits": Arm("logits", logits_noise=0.3, noise_target_kl=0.1, correction="none"),
        "half": Arm("half", noise=True, noise_share=0.5, correction="token_balance"),
        "slow": Arm("slow", noise=True, learning_rate=1e-5),
    }  # fmt: skip
    found = {
        name: noise_tables._control(arms, name) for name in ("aqn", "bf16_aqn", "logits", "half", "slow")
    }
    assert found == {"aqn": "none", "bf16_aqn": "bf16", "logits": "bare", "half": "none", "slow": None}


def test_results_that_are_not_there_get_a_sentence(name):
    said = "No results yet: bench/results has no none.json.gz.\n"
    assert study_tables.arms("none") == study_tables.comparisons("none", "primary") == said
    assert noise_tables.reached("none") == said
    assert probe_tables.perturbations("none", "start", "wp12") == probe_tables.formats("none", "wp12") == said
    assert probe_tables.beside("probe", "none", "wp12", "gain") == said
    assert study_tables.most("none", "accuracy") == study_tables.runs("none") == 0
    for table in noise_tables.TABLES.values():
        assert table()


def test_figures_are_drawn_of_what_is_there(name, tmp_path):
    pytest.importorskip("scipy")
    old = tmp_path / "images" / "wp12" / "accuracy-old.svg"
    old.parent.mkdir(parents=True)
    old.write_text("")
    said = draw.draw()
    assert "figures of noise-wp12.json.gz" in said[0] and not old.exists()
    assert said[1:] == [study_tables.absent(one).strip() for one in (
        "noise-wp1", "noise-needle", "probe", "probe-trained",
    )]  # fmt: skip
    drawn = {path.stem for path in old.parent.iterdir()}
    assert {"differences", "accuracy-primary", "accuracy-other", "rollout-entropy-other"} <= drawn
    assert not {"rewards-accuracy-mean-primary", "entropy-primary"} & drawn
    shown = draw.shown("wp12", "differences", "accuracy-primary")
    assert "![differences, wp12](images/wp12/differences.svg)" in shown and shown.count("![") == 2
    assert "are not drawn yet" in draw.shown("wp1", "")


def test_policies_on_their_way_stand_beside_the_start(monkeypatch):
    monkeypatch.setattr(probe_tables, "RESULTS", RESULTS)
    found = probe_tables.probe("probe")
    cells = {
        key.replace("start", "step_10"): cell | {"policy": "step_10"}
        for key, cell in found["cells"].items()
        if cell["policy"] == "start" and cell.get("target") in (None, 0.02, 0.1)
    }
    both = {"probe": found, "later": found | {"cells": cells}}
    monkeypatch.setattr(probe_tables, "probe", both.get)
    monkeypatch.setattr(probe_tables, "read", lambda name: read_rows(both[name]))
    lines = probe_tables.beside("probe", "later", "wp12", "gain").splitlines()
    assert lines[0] == "| perturbation | KL aimed at | start | step 10 |"
    rows = [line.split("|")[1:-1] for line in lines[2:-2]]
    assert len(rows) >= 10 and {row[1].strip() for row in rows} == {"0.02", "0.1"}
    assert all(row[2] == row[3] for row in rows)  # the same cells under another name
    one = probe_tables.more("probe", "wp12", "nvfp4", "bf16", "entropy_more")
    other = probe_tables.more("probe", "wp12", "bf16", "nvfp4", "entropy_more")
    assert one.startswith("+0.083 (") and other.startswith("-0.083 (")
