"""The smallest fair version on a model of one's own: cost first, doses, runs, one file."""

import gzip

import numpy as np
import pytest

from bench.result import read_rows
from lab.__main__ import main
from lab.study import library, replicate
from lab.study.arms import Run
from lab.study.doses import stages_of
from lab.study.endpoints import endpoints, fisher
from lab.study.library import FOLDER
from lab.study.results import RESULTS_FILE, Results, RunResult, portable, read_results, write_results
from lab.study.spec import make_study
from lab.study.statistics import wilcoxon
from qerl import yaml12
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes
from qerl.settings.library import read_mapping

SMALL = {
    "steps": 10, "eval_steps": 5, "eval_samples": 4, "prompts_per_step": 2, "samples_per_prompt": 2,
    "max_completion_length": 4, "test_seeds": 3,
}  # fmt: skip


@pytest.fixture
def plans(tmp_path, monkeypatch):
    """Both plans with few and short runs, and a model that need not be right at first."""
    folder = tmp_path / "plans"
    folder.mkdir()
    for name in (replicate.DOSES, replicate.PLAN):
        values = read_mapping(FOLDER / f"{name}.yaml", "study") | SMALL
        (folder / f"{name}.yaml").write_text(yaml12.dump(values))
    monkeypatch.setattr(library, "FOLDER", folder)
    monkeypatch.setattr(replicate, "TOO_HARD", 0.0)


def test_the_cost_is_said_and_nothing_runs(llama_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["replicate", str(llama_folder), "--output_dir", str(out)]) == 0
    said = capsys.readouterr().out
    assert "68 runs take" in said and "hours on two CPU cores" in said and "add --yes" in said
    assert not out.exists()


@pytest.mark.slow
def test_with_yes_it_fits_doses_runs_and_writes_one_file(llama_folder, tmp_path, plans, capsys):
    out = tmp_path / "out"
    assert main(["replicate", str(llama_folder), "--output_dir", str(out), "--yes"]) == 0
    file = out / f"replicate-{llama_folder.name}.json.gz"
    said = capsys.readouterr().out.replace("\n", "")
    assert f"Wrote {file}" in said
    assert all(
        f"{arm}: its dose of 0.03 nats per token was m" in said for arm in ("aqn_03", "temperature_03")
    )
    results = read_results(file)
    assert results.study.model == llama_folder.name  # and not its path
    arms = results.study.arms
    assert list(arms) == ["none", "bf16", "aqn_03", "temperature_03"]
    assert {arm.correction for arm in arms.values()} == {"none"}
    sigma, warm = arms["aqn_03"].noise_sigma_stages, arms["temperature_03"].temperature_stages
    assert sigma[0] == 0 and min(sigma[1:]) > 0 and warm[0] == 1 and min(warm[1:]) > 1
    assert len(results.runs) == 4 * 3 and len(endpoints(results)) == 2 * 4
    again = read_results(out / "doses" / RESULTS_FILE)  # the doses are those of the second turn
    assert list(again.study.arms) == ["aqn", "bf16", "temperature", "aqn_03", "temperature_03"]
    assert sigma == stages_of([again.of("aqn"), again.of("aqn_03")], replicate.KL, replicate.STAGES)
    assert sigma != again.study.arms["aqn_03"].noise_sigma_stages
    assert (out / "study" / "study.html").is_file()
    before = file.read_bytes()
    assert main(["replicate", str(llama_folder), "--output_dir", str(out), "--yes"]) == 0
    assert file.read_bytes() == before  # nothing is computed again


def test_a_task_without_room_is_refused():
    with pytest.raises(QeRLError, match="too easy for m, which has 95% right before training; name a harder"):
        replicate._check_start(0.95, "m", "wp12")
    with pytest.raises(QeRLError, match="too hard"):
        replicate._check_start(0.0, "m", "wp12")
    replicate._check_start(0.2, "m", "wp12")


def test_a_model_that_stays_where_it_began_has_not_collapsed():
    assert both_plans()[1].collapse_below < replicate.TOO_HARD
    assert {arm.weights for arm in both_plans()[0].arms.values()} == {
        "nvfp4",
        "bf16",
    }  # both starts are looked at


def test_a_missed_stage_is_a_missed_dose():
    study = both_plans()[1]
    stages = {"aqn_03": {"noise": True, "noise_sigma_stages": [0.0, *[0.01] * 4]}}
    study = make_study({**study.values(), "arms": {"none": {}, **stages}, "comparisons": {}})
    for third, said in ((0.05, "met"), (0.07, "missed"), (0.01, "missed")):
        kl = [0.0] * 8 + [0.03] * 8 + [third] * 8 + [0.03] * 16
        runs = [
            RunResult(Run(arm, seed, 2e-4), {"sampling/kl": kl}, study.eval_at, {"accuracy": [0.2] * 6})
            for arm in study.arms.values() for seed in study.test_seeds
        ]  # fmt: skip
        (line,) = replicate._doses_met(Results(study, runs))
        stages = f"by stage 0.030, {third:.3f}, 0.030, 0.030."
        assert line == f"aqn_03: its dose of 0.03 nats per token was {said}; {stages}"


def both_plans():
    arms = replicate._stand_ins()
    return [replicate._study(name, {"model": "m"}, arms) for name in (replicate.DOSES, replicate.PLAN)]


def test_the_cost_of_smollm2_is_what_was_measured_and_grows_with_the_model():
    smollm2 = replicate.cost_of(replicate.MEASURED, both_plans(), 141e9)
    assert smollm2.runs == 4 * 12 + 5 * 4 and replicate.MEASURED.parameters == 134_515_008
    row = next(r for r in read_rows("study-h200") if r["runs"] == 8)
    scores = (4 * 12 * 6 + 5 * 4 * 2) * row["evaluation_s"] / 8
    assert smollm2.seconds == pytest.approx(68 * 40 * row["seed_step_s"] + scores)
    said = replicate._said("m", replicate.MEASURED, smollm2, 141e9)
    assert "68 runs take some 4 minutes on an H200" in said and " of 141 GB of its memory" in said
    large = replicate.cost_of(Sizes.by_name("1.5b"), both_plans(), 80e9)
    assert 8 < large.seconds / smollm2.seconds < 14 and large.gigabytes < 0.8 * 80 + 1e-6
    assert large.tokens_per_forward <= smollm2.tokens_per_forward == 32768
    with pytest.raises(QeRLError, match=r"need a GPU of \d+ GB, but this one has 24 GB"):
        replicate.cost_of(Sizes.by_name("7b"), both_plans(), 24e9)


def test_twelve_seeds_can_say_something():
    """One Holm correction over eight tests leaves both endpoints a claim."""
    study = both_plans()[1]
    seeds, tests = len(study.test_seeds), 2 * sum(map(len, study.comparisons.values()))
    rising = np.linspace(0.01, 0.1, seeds)
    assert wilcoxon(rising) * tests < 0.05 and fisher(8, 0, seeds) * tests < 0.05


def test_a_relative_path_is_not_sent(tmp_path, monkeypatch):
    (tmp_path / "models" / "own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    for given, sent in (("own", "own"), ("../models/own", "own"), ("../gone/own", "own"), ("/a/own", "own"),
                        ("owner/model", "owner/model"), ("../models", "models")):  # fmt: skip
        study = replicate._study(replicate.DOSES, {"model": given}, {})
        write_results(Results(study, []), tmp_path / "x")
        (tmp_path / "y").write_bytes(portable((tmp_path / "x").read_bytes()))
        assert read_results(tmp_path / "y").study.model == sent
    monkeypatch.chdir(tmp_path)
    write_results(Results(replicate._study(replicate.DOSES, {"model": "models/own"}, {}), []), tmp_path / "x")
    assert b"models/own" not in gzip.decompress(portable((tmp_path / "x").read_bytes()))
