"""The docs' tables of studies."""

import gzip
import json
from dataclasses import replace

import pytest
from rich.console import Console

from lab.study.arms import Arm
from lab.study.results import Results, write_results
from lab.study.runner import Runner
from lab.study.store import Store
from lab.writers import (
    draw,
    endpoint_tables,
    found_tables,
    noise_numbers,
    noise_tables,
    study_tables,
    take,
)
from qerl.errors import QeRLError
from tests.support.study import FakeMake, tiny_study

IMAGES = draw.IMAGES
NOISE = {"noise": True, "noise_stages": 2}
ARMS = {"none": None, "aqn": NOISE, "temperature": {"match_entropy": "aqn"}, "late": None}
PAIRS = {"primary": [["aqn", "none"], ["late", "none"]], "other": [["none", "aqn"]]}


@pytest.fixture
def name(tmp_path, monkeypatch):
    """A study among the results, in which the arm `late` has not run and `none` moves its entropy; the others
    are there without any run."""
    study = tiny_study(arms=ARMS, comparisons=PAIRS, steps=14, learning_rates=[2e-4], tuning_seeds=0)
    store = Store(tmp_path / "x", study)
    assert Runner(store, FakeMake(), Console(quiet=True)).run()
    results = store.results()
    for run in results.of("temperature"):
        run.steps["temperature/error"] = [0.0] * 12 + [0.01 * (1 + run.run.seed), None]
        run.steps["temperature"] = [1.0] * 14
    for run in results.of("aqn"):
        run.steps["sampling/kl"] = [0.0] * 2 + [0.03] * 12
        clean, noisy = run.steps["rollout/entropy"][:2], run.steps["rollout/entropy"][2:]
        run.steps["rollout/entropy"] = [*clean, *(value + 0.5 for value in noisy)]
    monkeypatch.setattr(study_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(draw, "IMAGES", tmp_path / "images")
    there = [run for run in results.runs if run.run.arm.name != "late"]
    write_results(Results(study, there), tmp_path / "noise-wp12.json.gz")
    nothing = Results(tiny_study(comparisons={}, task_options={"prior": 0.003}), [])
    for other in ("noise-wp1", "noise-needle", study_tables.EARLIER):
        write_results(nothing, tmp_path / f"{other}.json.gz")
    functions = study_tables.study, study_tables.compared
    for function in functions:
        function.cache_clear()
    yield "noise-wp12"
    for function in functions:
        function.cache_clear()


def test_arms_have_their_rate_and_their_spread(name):
    lines = study_tables.arms(name).splitlines()
    assert lines[2].startswith("| none | 0.0002 | 0.000 | 0.700 (0.000) | 1.400 (0.000) | 0 of 3 | 0 | 0 |")
    assert lines[3].startswith("| aqn | 0.0002 | 0.000 | 0.852")
    assert lines[-1].startswith("m on arithmetic {}: 9 runs of 14 steps, fake. File: noise-wp12.json.gz.")
    assert lines[-1].endswith("Collapsed: ends below 0.4, wherever it began.")


def test_a_run_that_ends_below_its_start_is_counted_beside_the_collapses(name):
    results = study_tables.study(name)
    run = results.of("none")[0]
    run.evaluations["accuracy"] = [0.9] * (len(run.eval_at) - 1) + [0.8]
    (line,) = (line for line in study_tables.arms(name).splitlines() if line.startswith("| none |"))
    assert "| 0 of 3 | 1 | 0 |" in line


def test_every_rate_that_was_tried_is_shown_and_the_one_taken_is_said(name, monkeypatch, tmp_path):
    arms = {"none": None, "aqn": NOISE}
    store = Store(tmp_path / "y", tiny_study(arms=arms, steps=14, collapse_below=0.8))
    assert Runner(store, FakeMake(), Console(quiet=True)).run()
    monkeypatch.setattr(study_tables, "study", {"tried": store.results()}.get)
    lines = study_tables.tuned("tried").splitlines()
    assert lines[0] == "| arm, learning rate | area (SD) | collapsed | taken |"
    assert lines[2:4] == [
        "| none, 0.0001 | 0.350 (0.000) | 2 of 2 | |",
        "| none, 0.0002 | 0.700 (0.000) | 0 of 2 | yes, an end |",
    ]
    assert lines[-1].startswith("2 seeds that no comparison uses.")


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
    assert "relative \N{MINUS SIGN} none" not in lines  # nothing of it ran
    untested = lines["temperature \N{MINUS SIGN} none"]  # no comparison of the study, so without a verdict
    assert "p 1 uncorrected | not run | not run |" in untested
    assert noise_tables.entropies().count("not run") == 4  # while training; probes are there
    assert noise_tables.learned().count("not run") == 2 * 3


def test_what_is_not_known_is_what_has_not_run_or_is_undecided(name, monkeypatch):
    pytest.importorskip("scipy")
    undecided, missing = noise_tables.unanswered().splitlines()
    assert undecided.startswith("- Undecided on `wp12`") and "aqn \N{MINUS SIGN} none (0." in undecided
    assert missing.startswith("- Not run on `wp12`: late \N{MINUS SIGN} none, linear \N{MINUS SIGN} none, ")
    monkeypatch.setattr(noise_tables, "ABLATIONS", ())
    assert noise_tables.unanswered().splitlines()[1:] == ["- Not run on `wp12`: late \N{MINUS SIGN} none."]


def test_arms_with_noise_that_learned_better_are_counted_and_named(name, monkeypatch):
    pytest.importorskip("scipy")
    assert noise_numbers.better() == "none of 1 arms with noise"  # three seeds decide nothing
    (helps, *_) = study_tables.compared(name)
    found = {name: [replace(helps, holm=0.01, differences=(0.1, 0.2, 0.3))]}
    monkeypatch.setattr(noise_numbers, "compared", lambda name: found.get(name, []))
    assert noise_numbers.better() == "1 of 1 arms with noise (`aqn` on `wp12`)"
    low, high = helps.interval
    assert noise_numbers.said("wp12", "aqn", "none") == f"+0.152 ({low:+.3f} to {high:+.3f}), helps"
    assert noise_numbers.said("wp1", "aqn", "none") == "not run"


def test_the_first_dose_is_that_of_the_first_quarter_of_the_noisy_steps(name):
    for run in study_tables.study(name).of("aqn"):
        run.steps["sampling/kl"] = [9.0, 9.0, 0.25, 0.5, 0.75, *[9.0] * 9]
        run.steps["noise/sigma"] = [0.0, 0.0, *[0.5] * 12]
    assert noise_numbers.first_kl("aqn", "late") == noise_numbers.doses() == "0.50 to 0.50"
    assert noise_numbers.first_kl("late") == "not run"


def test_the_runs_behind_a_count_of_arms_are_counted_once(name):
    pytest.importorskip("scipy")
    assert noise_numbers.runs() == "6"  # aqn and none, not the temperature


def test_what_aqn_changes_is_shown_of_both_runs_of_the_same_seeds(name, tmp_path):
    """Of two studies by the same seeds the mean of each seed, over the run and at the end."""
    pytest.importorskip("scipy")
    results = study_tables.study(name)
    none, (first, *_) = results.of("none"), results.of("aqn")
    others = [replace(run, run=replace(run.run, arm=results.study.arms["aqn"])) for run in none]
    others[0].evaluations["accuracy"] = [value - 0.3 for value in none[0].evaluations["accuracy"]]
    study_tables.study.cache_clear()
    write_results(Results(results.study, [*none, *others]), tmp_path / f"{study_tables.EARLIER}.json.gz")
    names = (name, study_tables.EARLIER)
    more = endpoint_tables.over_runs(names, "aqn", "none", study_tables.area)
    alone = study_tables.paired(
        *(study_tables.by_seed(name, arm, study_tables.area) for arm in ("aqn", "none"))
    )
    assert first.run.seed == 0 and more == pytest.approx(alone / 2)  # the same records in `none` and `others`
    (line,) = (line for line in endpoint_tables.paper().splitlines() if "two runs of each seed" in line)
    assert line.endswith("| 0 of 6 and 0 of 6 |")


def test_a_run_that_leaves_the_plateau_is_counted(name):
    pytest.importorskip("scipy")
    for run in study_tables.study(name).runs:
        values = [0.02] * len(run.eval_at)
        if (run.run.arm.name, run.run.seed) in {("aqn", 1), ("temperature", 2)}:
            values[-1] = 0.3
        run.evaluations["accuracy/steps_2"] = values
    lines = endpoint_tables.two_steps().splitlines()
    assert lines[2].startswith("| none | 2.0 (2.0 to 2.0) | | | 0 of 3 | 2.0 |")
    assert lines[3].startswith("| aqn | 11.3 (") and lines[3].endswith("| 1 of 3 | 30.0 |")
    assert endpoint_tables.escaped() == "2 of 9" and endpoint_tables.escaped("none") == "0 of 3"
    assert endpoint_tables.still_rising() == "2 of 2"


def test_a_comparison_whose_arms_part_before_the_noise_is_named_and_leaves_nothing_open(name):
    pytest.importorskip("scipy")
    words = "Not the noise's alone, since the two differ before it begins: aqn \N{MINUS SIGN} none"
    assert words not in study_tables.comparisons(name, "primary")
    assert "aqn \N{MINUS SIGN} none" in noise_tables.unanswered()
    for run in study_tables.study(name).of("aqn"):
        run.steps["rollout/entropy"][1] += 0.1
    study_tables.compared.cache_clear()
    assert words in study_tables.comparisons(name, "primary")
    assert "aqn \N{MINUS SIGN} none (" not in noise_tables.unanswered()


def test_when_a_needle_is_found_and_when_half_of_the_samples_find_it(name, monkeypatch):
    pytest.importorskip("scipy")
    results = study_tables.study(name)
    results = replace(results, study=replace(results.study, task_options={"prior": 0.003}))
    for run in results.runs:
        late = 2 * (run.run.arm.name == "none")
        right = [0.0] * (3 + run.run.seed + late) + [0.25, 0.5]
        run.steps["rewards/accuracy/mean"] = (right + [1.0] * 14)[:14]
    monkeypatch.setattr(found_tables, "study", lambda name: results)
    lines = found_tables.discovery(name).splitlines()
    assert lines[3].split("|")[3:7] == [
        " 5.0 (4.0 to 6.0) ", " -2.0 (-2.0 to -2.0) ", " 6.0 (5.0 to 7.0) ", " -2.0 (-2.0 to -2.0) ",
    ]  # fmt: skip
    assert lines[2].split("|")[3:7] == [" 7.0 (6.0 to 8.0) ", " ", " 8.0 (7.0 to 9.0) ", " "]
    assert "expected in step 5.7." in lines[-1]
    results.runs[0].steps["rewards/accuracy/mean"] = [0.0] * 14
    assert found_tables.first_found(results.runs[0]) == found_tables.half_found(results.runs[0]) == 15.0


def test_noisy_and_clean_samples_are_compared_while_there_is_noise(name, monkeypatch):
    results = study_tables.study(name)
    arms = {
        one: replace(arm, noise_share=0.5 if one == "aqn" else 1.0) for one, arm in results.study.arms.items()
    }
    halved = replace(results, study=replace(results.study, arms=arms))
    for run in halved.of("aqn"):
        values = {"noisy": 0.3, "clean": 0.5, "only_noisy": 0.1 * run.run.seed, "only_clean": 0.1}
        run.steps.update({key: [9.0] * 2 + [value] * 12 for key, value in values.items()})
    monkeypatch.setattr(found_tables, "study", {"x": halved, "y": results}.get)
    cells = [
        cell.strip() for cell in found_tables.halves({"wp12": "x", "wp1": "y"}).splitlines()[2].split("|")
    ]
    assert cells[1:5] == [
        "wp12: aqn",
        "0.300 (0.300 to 0.300)",
        "0.500 (0.500 to 0.500)",
        "-0.200 (-0.200 to -0.200)",
    ]
    assert cells[7] == "+0.000 (-0.100 to +0.100)"
    assert "has run yet" in found_tables.halves({"wp1": "y"})


def test_what_the_noise_reached(name):
    pytest.importorskip("scipy")
    lines = noise_tables.reached(name).splitlines()
    assert lines[2].startswith("| aqn | 3 to 14 | 0.5 | 0.5 | 0.0300 (0.0300 to 0.0300) | 0.0300 (")
    assert "| 0.500 (0.500 to 0.500) |" in lines[2] and lines[3] == ""
    follows = noise_tables.follows().splitlines()
    assert follows[2] == (
        "| wp12: temperature after aqn, steps 3 to 5 | 0.0300 (0.0300 to 0.0300) | +0.500 (+0.500 to +0.500) "
        "| +0.000 (+0.000 to +0.000) | -0.500 (-0.500 to -0.500) | 1.000 (1.000 to 1.000) |"
    )
    assert follows[3].startswith("| wp12: temperature after aqn, steps 6 to 14 | 0.0300 ")


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


def test_every_table_is_made_where_arms_have_not_run(name):
    pytest.importorskip("scipy")
    assert study_tables.difference("noise-wp1", "aqn", "none", len) == "not run"
    for table in noise_tables.TABLES.values():
        assert table()


def test_results_that_are_not_there_are_an_error_unless_they_are_only_planned(name):
    assert study_tables.study_or_none("none") is None
    assert study_tables.study_or_none(name) is study_tables.study(name)
    with pytest.raises(QeRLError, match=r"none\.json\.gz holds no results of a study"):
        study_tables.arms("none")


@pytest.mark.parametrize(
    ("model", "kept"), [("/home/x/m.gguf", "m.gguf"), ("HuggingFaceTB/SmolLM2", "HuggingFaceTB/SmolLM2")]
)
def test_results_are_taken_without_the_path_of_a_model(model, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(take, "RESULTS", tmp_path)
    source = tmp_path / "results.json.gz"
    source.write_bytes(
        gzip.compress(json.dumps({"study": {"model": model, "steps": 2}, "runs": [1]}).encode())
    )
    written = json.loads(gzip.decompress(take.take(source, "new").read_bytes()))
    assert written == {"study": {"model": kept, "steps": 2}, "runs": [1]}
    assert (
        take.take(tmp_path / "new.json.gz", "again").read_bytes() == (tmp_path / "new.json.gz").read_bytes()
    )


def test_figures_are_drawn_anew(name, tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    old = tmp_path / "images" / "wp12" / "accuracy-old.svg"
    old.parent.mkdir(parents=True)
    old.write_text("")
    monkeypatch.setattr(draw, "STUDIES", {"wp12": name})
    said = draw.draw()
    assert "figures of noise-wp12.json.gz" in said[0] and not old.exists()
    assert len(said) == 1 + len(draw.PROBES)
    for folder in draw.PROBES:
        probes = sorted((draw.IMAGES / folder).iterdir())
        assert [path.read_text() for path in probes] == [
            path.read_text() for path in sorted((IMAGES / folder).iterdir())
        ], "what the docs show"
    drawn = {path.stem for path in old.parent.iterdir()}
    assert {"differences", "accuracy-primary", "accuracy-other", "rollout-entropy-other"} <= drawn
    assert not {"rewards-accuracy-mean-primary", "entropy-primary"} & drawn
    shown = draw.shown("wp12", "differences", "accuracy-primary")
    assert "![differences, wp12](images/wp12/differences.svg)" in shown and shown.count("![") == 2
    assert "are not drawn yet" in draw.shown("wp1", "")
