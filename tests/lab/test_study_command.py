"""`python -m lab study`: which files make a study, what is drawn again, what mistakes are called."""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import qerl.cli
from lab.__main__ import main
from lab.study.library import FOLDER, study_file
from lab.study.results import RESULTS_FILE
from lab.study.spec import joined, read_study
from qerl import yaml12
from qerl.settings.library import read_header, read_mapping
from tests.support.study import FakeMake, tiny_study

NOISE = (("noise",), ("noise", "designs", "formats", "ablations"))
TASKS = ("wp1", "wp12")


@pytest.fixture
def make(monkeypatch):
    """What computes, without a model."""
    made = FakeMake()
    monkeypatch.setitem(sys.modules, "lab.study.compute", SimpleNamespace(StudyMake=lambda study: made))
    return made


@pytest.fixture
def files(tmp_path):
    """The tiny study as two files, of which the second has the seeds."""
    values = tiny_study(comparisons={}).values()
    (tmp_path / "a.yaml").write_text(yaml12.dump(values | {"test_seeds": 9}))
    (tmp_path / "b.yaml").write_text("test_seeds: 3\n")
    return [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]


def test_a_study_is_computed_drawn_and_drawn_again(tmp_path, files, make, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", *files, "--dry-run"]) == 0
    assert "14 runs of 4 steps" in capsys.readouterr().out and not Path("runs").exists()
    assert main(["study", *files, "--figures", "svg"]) == 0
    folder = tmp_path / "runs" / "a-b"
    page = (folder / "study.html").read_bytes()
    assert sum(len(runs) for runs, _ in make.made) == 2 * (4 + 3)
    assert (tmp_path / "svg" / "accuracy.svg").is_file()
    assert main(["study", *files, "--dry_run"]) == 0
    assert "0 runs are left" in capsys.readouterr().out
    make.made.clear()
    assert main(["study", *files]) == 0 and make.made == []
    (tmp_path / "more.yaml").write_text("test_seeds: 4\n")
    before = (folder / "study.json").read_bytes()
    more = ["study", *files, "more.yaml", "--output_dir", str(folder), "--dry_run"]
    assert main(more) == 0 and "2 runs are left" in capsys.readouterr().out
    assert (folder / "study.json").read_bytes() == before
    (folder / "study.html").unlink()
    assert main(["study", str(folder)]) == 0
    assert (folder / "study.html").read_bytes() == page
    shutil.copy(folder / RESULTS_FILE, tmp_path / "noise.json.gz")
    assert main(["study", "noise.json.gz", "--output_dir", "elsewhere"]) == 0
    assert (tmp_path / "elsewhere" / "study.html").read_bytes() == page


@pytest.mark.slow
def test_arms_of_several_files_are_put_together(tmp_path, files, make, capsys):
    more = tmp_path / "more.yaml"
    more.write_text("arms: {slow: {learning_rate: 5.0e-5}}\ncomparisons: {rates: [[slow, none]]}\n")
    assert main(["study", *files, str(more), "--output_dir", str(tmp_path / "out")]) == 0
    assert sum(len(runs) for runs, _ in make.made) == 2 * (4 + 3) + 3
    assert main(["study", *files, str(more), "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "17 runs of 4 steps" in said and "slow at learning rate 5e-05 of its own" in said
    more.write_text("arms: {none: {lora_r: 4}}\n")
    assert main(["study", *files, str(more)]) == 2
    wrong = " ".join(capsys.readouterr().err.split())
    assert "more.yaml: arms.none has other values in an earlier file; rename it." in wrong


def test_ctrl_c_ends_with_130_and_a_page_of_what_there_is(tmp_path, files, make, capsys):
    def interrupt(trainer):
        if len(make.made) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    make.on_step = interrupt
    assert main(["study", *files, "--output_dir", str(tmp_path / "out")]) == 130
    assert "Run the same command to continue." in capsys.readouterr().out
    assert "3 finished runs" in (tmp_path / "out" / "study.html").read_text()


def test_without_scipy_the_results_are_safe(tmp_path, files, make, monkeypatch, capsys):
    monkeypatch.setattr("lab.study.statistics.has_module", lambda name: False)
    (tmp_path / "c.yaml").write_text("comparisons: {primary: [[aqn, none]]}\n")
    words = ["study", *files, str(tmp_path / "c.yaml"), "--output_dir", str(tmp_path / "out")]
    assert main(words) == 0
    assert "No page was drawn. The statistics of a study need scipy" in capsys.readouterr().out
    assert (tmp_path / "out" / RESULTS_FILE).is_file()
    assert main(["study", str(tmp_path / "out")]) == 2


def test_the_package_says_where_studies_are(capsys):
    assert qerl.cli.main(["study", "sweep", "--dry-run"]) == 2
    assert "in a clone, run `python -m lab study`." in " ".join(capsys.readouterr().err.split())


def test_where_a_missing_study_went_is_said(capsys):
    with pytest.raises(SystemExit):
        main(["study", "--again", "none", "sweep"])
    assert "STUDY; --again takes all words up to the next flag" in capsys.readouterr().err


def test_mistakes(tmp_path, files, make, capsys):
    def said(*words):
        assert main(["study", *words]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "no study named 'swep'; did you mean 'sweep'?" in said("swep")
    assert "none.yaml cannot be read" in said(str(tmp_path / "none.yaml"))
    (tmp_path / "arm.yaml").write_text("comparisons: {primary: [[aqm, none]]}\n")
    wrong = said(*files, str(tmp_path / "arm.yaml"))
    assert f"In the study {files[0]}, {files[1]}" in wrong and "(did you mean 'aqn'?)." in wrong
    out = str(tmp_path / "out")
    assert main(["study", *files, "--output_dir", out]) == 0
    (tmp_path / "steps.yaml").write_text("steps: 5\n")
    assert "holds another study: its steps is 4 and not 5" in said(
        *files, str(tmp_path / "steps.yaml"), "--output_dir", out
    )
    assert f"{out} holds results, which are only redrawn" in said(out, "--again", "none")
    assert "names the unknown arm 'nine'" in said(*files, "--output_dir", out, "--again", "nine")
    assert "no-study.json.gz holds no results of a study" in said(str(tmp_path / "no-study.json.gz"))


def test_the_sweep_is_whole():
    path = study_file("sweep")
    read_header(path)
    read_study(str(path), read_mapping(path, "study"))


@pytest.mark.parametrize(
    "files",
    [
        *((*arms, task) for arms, task in itertools.product(NOISE, TASKS)),
        ("needle",),
        ("noise", "wp12", "bf16"),
    ],
)
def test_studies_of_the_project_are_whole(files):
    values = {}
    for name in files:
        values = joined(values, read_mapping(FOLDER / f"{name}.yaml", "study"), name)
    study = read_study("x", values)
    assert len(study.test_seeds) >= 32 and not study.tunes
    rates = {name: arm.learning_rate for name, arm in study.arms.items() if arm.learning_rate is not None}
    assert rates == ({"none_slow": 1e-4, "relative_slow": 1e-4} if "designs" in files else {})
    controls = {(arm.correction, arm.noise) for arm in study.arms.values()}
    for pair in study.comparisons["primary"]:
        arms = [study.arms[name] for name in pair]
        assert arms[0].correction == arms[1].correction, "noise and correction are told apart"
    assert {("none", False), ("token_one_sided", False)} <= controls


PLANS = [
    *(("matched", task) for task in ("testbed-chain", "testbed-lock", "words")),
    ("wp12", "four-bits"),
    ("wp12", "own-rates"),
]


@pytest.mark.parametrize("files", PLANS)
def test_plans_are_whole_and_their_seeds_are_their_own(files):
    """With the arms that a fit will write in place of `matched`'s doses."""
    noise = {"noise": True, "noise_sigma_stages": [0.0, 0.1]}
    doses = {
        f"{name}_{kl}": noise for name in ("aqn", "sample", "relative") for kl in ("003", "01", "03", "1")
    }
    doses |= {f"temperature_{kl}": {"temperature_stages": [1.0, 1.1]} for kl in ("003", "01", "03", "1")}
    values = {"arms": doses} if "matched" in files else {}
    for name in files:
        values = joined(values, read_mapping(FOLDER / f"{name}.yaml", "study"), name)
    study = read_study("x", values)
    assert len(study.test_seeds) >= 32 and min(study.test_seeds) > 131
    assert study.escape_above is not None or study.collapse_below == 0.1
    named = {name for pairs in study.comparisons.values() for pair in pairs for name in pair}
    assert named <= study.arms.keys() and len(study.comparisons) >= 1


def test_plans_share_no_seed():
    plans = [
        read_mapping(FOLDER / f"{name}.yaml", "study")
        for name in ("matched", "four-bits", "own-rates", "doses")
    ]
    seeds = [seed for plan in plans for key in ("test_seeds", "tuning_seeds") for seed in plan.get(key, [])]
    assert len(seeds) == len(set(seeds))
