"""A study's folder: of which study, model and commit its runs are, and what is said of damaged files."""

import json
import os
import shutil
import signal

import pytest
from rich.console import Console

from lab.study.plan import make_plan
from lab.study.results import RESULTS_FILE, Results, by_key, read_results, write_results
from lab.study.runner import Runner
from lab.study.spec import make_study
from lab.study.store import Store
from qerl.atomic import write_whole
from qerl.errors import QeRLError
from tests.support.study import QUIET, FakeMake, computed, tiny_study


def at_commit(folder, study, commit, **kwargs):
    """The study's folder as another commit has it."""
    store = Store(folder, study, **kwargs)
    store.commit = commit
    return store


def test_runs_and_folder_say_by_which_commit_and_with_which_model(tmp_path):
    study = tiny_study()
    assert Runner(at_commit(tmp_path, study, "aaaaaaa"), FakeMake(), QUIET).run()
    assert json.loads((tmp_path / "study.json").read_text()).items() >= {
        "commit": "aaaaaaa", "fingerprint": "f",
    }.items()  # fmt: skip
    results = Store(tmp_path, study).write_results()
    facts = [one.facts for one in read_results(tmp_path / RESULTS_FILE).runs]
    assert {(fact["commit"], fact["fingerprint"]) for fact in facts} == {("aaaaaaa", "f")}
    assert len(facts) == len(results.runs) == 14


def test_another_model_under_the_same_name_is_refused(tmp_path):
    study = tiny_study()
    computed(tmp_path, study)
    grown = Store(tmp_path, tiny_study(test_seeds=4))
    other = FakeMake(facts={"fingerprint": "g"})
    with pytest.raises(QeRLError, match="of another model: the fingerprint of m is now g, not f"):
        Runner(grown, other, QUIET).run()
    assert other.made == []


def test_another_commit_is_said_and_repeats_nothing_that_is_finished(tmp_path, capsys):
    study = tiny_study(learning_rates=[1e-4], tuning_seeds=0)
    assert Runner(at_commit(tmp_path, study, "aaaaaaa"), FakeMake(), QUIET).run()
    make = FakeMake()
    grown = tiny_study(learning_rates=[1e-4], tuning_seeds=0, test_seeds=4)
    assert Runner(at_commit(tmp_path, grown, "bbbbbbb"), make, Console(width=300)).run()
    assert (
        "holds 6 runs of commit aaaaaaa, but the current commit is bbbbbbb; --again ARM"
        in capsys.readouterr().out
    )
    assert sum(len(runs) for runs, _ in make.made) == 2
    assert {one.commit for one in Store(tmp_path, grown).results().tested("none")} == {"aaaaaaa", "bbbbbbb"}


def test_an_arm_is_computed_again_by_a_new_commit_and_once(tmp_path, capsys):
    study = tiny_study(learning_rates=[1e-4], tuning_seeds=0)
    assert Runner(at_commit(tmp_path, study, "aaaaaaa"), FakeMake(), QUIET).run()
    arms = study.values()["arms"] | {"new": {"lora_r": 4}}
    grown = tiny_study(learning_rates=[1e-4], tuning_seeds=0, arms=arms)
    assert make_plan(at_commit(tmp_path, grown, "bbbbbbb", again=["none"])).open == 6
    make = FakeMake()
    assert Runner(at_commit(tmp_path, grown, "bbbbbbb", again=["none"]), make, Console(width=300)).run()
    assert [(runs[0].arm.name, len(runs)) for runs, _ in make.made] == [("none", 3), ("new", 3)]
    assert "3 runs are computed again, as they are of commit aaaaaaa." in capsys.readouterr().out
    found = Store(tmp_path, grown).results()
    commits = {arm: {one.commit for one in found.tested(arm)} for arm in arms}
    assert commits == {"none": {"bbbbbbb"}, "aqn": {"aaaaaaa"}, "new": {"bbbbbbb"}}
    assert len(list((tmp_path / "former").glob("none-*-aaaaaaa.json"))) == 3
    assert make_plan(at_commit(tmp_path, grown, "bbbbbbb", again=["none"])).open == 0
    with pytest.raises(QeRLError, match="--again names the unknown arm 'nine'"):
        Store(tmp_path, grown, again=["nine"])


def test_a_batch_that_another_commit_began_begins_anew(tmp_path, capsys):
    study = tiny_study(arms={"none": None}, comparisons={}, learning_rates=[1e-4], tuning_seeds=0)

    def interrupt(trainer):
        if trainer.done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    assert not Runner(at_commit(tmp_path, study, "aaaaaaa"), FakeMake(interrupt), QUIET).run()
    steps = []
    make = FakeMake(lambda trainer: steps.append(trainer.done))
    assert Runner(at_commit(tmp_path, study, "bbbbbbb"), make, Console(width=300)).run()
    assert steps == [0, 1, 2, 3]
    assert "its checkpoint is of commit aaaaaaa, not bbbbbbb." in capsys.readouterr().out


def test_a_folder_of_another_study_is_refused_and_a_study_may_grow(tmp_path):
    study = tiny_study()
    computed(tmp_path, study)
    with pytest.raises(QeRLError, match="holds another study: its steps is 4 and not 5"):
        Store(tmp_path, tiny_study(steps=5))
    with pytest.raises(QeRLError, match=r"its arms\.aqn\.noise_sigma_start is 0\.01 and not 0\.02"):
        Store(
            tmp_path,
            tiny_study(
                arms={"none": None, "aqn": study.values()["arms"]["aqn"] | {"noise_sigma_start": 0.02}}
            ),
        )
    make = computed(
        tmp_path, tiny_study(test_seeds=4, arms=study.values()["arms"] | {"warm": {"temperature": 1.2}})
    )
    assert {(run.arm.name, run.seed) for runs, _ in make.made for run in runs if run.arm.name != "warm"} == {
        ("none", 3),
        ("aqn", 3),
    }
    Store(tmp_path, tiny_study(arms={"none": None}, comparisons={}))
    with pytest.raises(QeRLError, match=r"arms\.warm\.temperature is 1\.2 and not 1\.3"):
        Store(tmp_path, tiny_study(arms={"warm": {"temperature": 1.3}}, comparisons={}))


def test_a_study_goes_on_from_its_results_alone(tmp_path):
    study = tiny_study()
    computed(tmp_path / "here", study)
    Store(tmp_path / "here", study).write_results()
    kept = (tmp_path / "here" / RESULTS_FILE).read_bytes()
    there = tmp_path / "there"
    there.mkdir()
    (there / RESULTS_FILE).write_bytes(kept)
    with pytest.raises(QeRLError, match="holds another study: its steps is 4 and not 5"):
        Store(there, tiny_study(steps=5))
    with pytest.raises(QeRLError, match="of another model: the fingerprint of m is now g"):
        Runner(Store(there, study), FakeMake(facts={"fingerprint": "g"}), QUIET).run()
    make = computed(there, tiny_study(test_seeds=4))
    assert {run.seed for runs, _ in make.made for run in runs} == {3}
    assert Store(there, study).write_results().runs == read_results(tmp_path / "here" / RESULTS_FILE).runs
    assert (there / RESULTS_FILE).read_bytes() == kept


@pytest.fixture
def packed(tmp_path):
    """A folder with the results of a study alone."""
    computed(tmp_path / "here", tiny_study())
    Store(tmp_path / "here", tiny_study()).write_results()
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy(tmp_path / "here" / RESULTS_FILE, there)
    return there


@pytest.mark.parametrize("written", [0, 1, 2, 9, 15])  # of study.json, 14 runs, study.json
def test_unpacking_that_was_interrupted_is_done_anew(packed, monkeypatch, written):
    study, kept, left = tiny_study(), read_results(packed / RESULTS_FILE).runs, iter(range(written))

    def killed(path, content):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write_whole(path, content)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("lab.study.store.write_whole", killed)
        Store(packed, study)
    assert make_plan(Store(packed, study, looking=True)).open == 0
    assert make_plan(Store(packed, study)).open == 0
    assert Store(packed, study).results().runs == kept
    (packed / RESULTS_FILE).unlink()  # not needed any more
    assert Store(packed, study).results().runs == kept


def test_a_look_counts_runs_that_are_still_packed_and_changes_nothing(packed):
    assert make_plan(Store(packed, tiny_study(test_seeds=4), looking=True)).open == 2
    assert [path.name for path in packed.iterdir()] == [RESULTS_FILE]
    with pytest.raises(QeRLError, match="holds another study: its steps is 4 and not 5"):
        Store(packed, tiny_study(steps=5), looking=True)


@pytest.mark.parametrize("looking", [True, False])
def test_results_of_several_models_are_refused(packed, looking):
    results = read_results(packed / RESULTS_FILE)
    results.runs[3].facts["fingerprint"] = "g"
    write_results(results, packed / RESULTS_FILE)
    with pytest.raises(QeRLError, match=r"runs of several models \(fingerprints f, g\), which cannot"):
        Store(packed, tiny_study(), looking=looking)
    assert not list(packed.glob("runs/*")) and not (packed / "study.json").exists()


def test_damaged_files_are_named(tmp_path):
    study = tiny_study()
    computed(tmp_path, study)
    path = tmp_path / "runs" / "none-lr0.0001-s1000.json"
    path.write_text("{")
    with pytest.raises(QeRLError, match=r"none-lr0\.0001-s1000\.json is damaged"):
        make_plan(Store(tmp_path, study))
    (tmp_path / "batches" / "b.pt").write_bytes(b"no tensors")
    with pytest.raises(QeRLError, match=r"b\.pt is damaged"):
        Store(tmp_path, study).checkpoint("b")
    (tmp_path / RESULTS_FILE).write_bytes(b"no gzip")
    with pytest.raises(QeRLError, match="holds no results of a study"):
        read_results(tmp_path / RESULTS_FILE)
    (tmp_path / "study.json").unlink()
    with pytest.raises(QeRLError, match=r"has runs but no study\.json"):
        Store(tmp_path, study)


def test_equal_results_give_equal_bytes(tmp_path):
    study = make_study(tiny_study().values())
    for name in ("a", "b"):
        write_results(Results(study, []), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_values_are_kept_to_six_digits():
    assert by_key([{"a": 1 / 3}, {"a": float("inf"), "b": 2.0}]) == {"a": [0.333333, None], "b": [None, 2.0]}
