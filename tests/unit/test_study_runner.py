"""A study's folder and what computes it: which batches, in which order, and what survives a kill."""

import json
import os
import signal
import weakref

import pytest
import torch
from rich.console import Console

from qerl.errors import QeRLError
from qerl.study.plan import make_plan
from qerl.study.results import RESULTS_FILE, Results, RunResult, by_key, read_results, write_results
from qerl.study.runner import Runner
from qerl.study.spec import make_study
from qerl.study.store import Checkpoint, Store
from tests.support.study import FakeMake, accuracy, tiny_study

QUIET = Console(quiet=True)


def computed(folder, study, make=None):
    make = make or FakeMake()
    assert Runner(Store(folder, study), make, QUIET).run()
    return make


def files(folder):
    return sorted(path.stem for path in (folder / "runs").iterdir())


def test_every_run_is_computed_once_and_the_rate_is_chosen(tmp_path):
    study = tiny_study()
    make = computed(tmp_path, study)
    names = [run.name for runs, _ in make.made for run in runs]
    assert len(names) == len(set(names)) == 2 * (4 + 3)
    assert all(len(runs) <= 3 and len({run.arm for run in runs}) == 1 for runs, _ in make.made)
    results = Store(tmp_path, study).write_results()
    assert results.rate("none") == results.rate("aqn") == 2e-4
    assert [result.run.seed for result in results.tested("aqn")] == [0, 1, 2]
    assert read_results(tmp_path / RESULTS_FILE) == results
    assert not list((tmp_path / "batches").glob("*.pt"))
    assert computed(tmp_path, study).made == []  # nothing is left to do


def test_a_result_holds_the_whole_curve(tmp_path):
    computed(tmp_path, tiny_study())
    plain = json.loads((tmp_path / "runs" / "aqn-lr0.0002-s2.json").read_text())
    assert plain["steps"]["rollout/entropy"] == [3.0, 4.0, 5.0, 6.0]
    assert plain["eval_at"] == [0, 2, 4]
    run = tiny_study().test_runs(tiny_study().arms["aqn"], 2e-4)[2]
    assert plain["evaluations"]["accuracy"] == [
        pytest.approx(accuracy(run, at), rel=1e-5) for at in (0, 2, 4)
    ]
    assert plain["facts"]["device"] == "fake" and plain["facts"]["seconds"] >= 0


def test_the_area_is_that_of_trapezoids_and_a_diverged_run_scores_zero_from_there():
    arm = tiny_study().arms["none"]
    run = tiny_study().test_runs(arm, 1e-4)[0]
    result = RunResult(run, {}, [0, 4, 10], {"accuracy": [0.0, 0.4, 1.0]})
    assert result.area == pytest.approx((4 * 0.2 + 6 * 0.7) / 10)
    assert RunResult(run, {}, [0, 4, 10], {"accuracy": [0.0, 0.4, 1.0]}, 5).accuracy == [0.0, 0.4, 0.0]
    assert RunResult(run, {}, [0, 4, 10], {"accuracy": [0.0, 0.4, 1.0]}, 4).accuracy == [0.0, 0.0, 0.0]


def test_a_diverged_run_is_kept_marked_and_counted(tmp_path, capsys):
    study = tiny_study(test_seeds=[0, 666])
    console = Console(width=200)
    assert Runner(Store(tmp_path, study), FakeMake(), console).run()
    assert "1 diverged" in capsys.readouterr().out
    sick, sound = Store(tmp_path, study).results().tested("aqn")[::-1]
    assert sick.diverged_at == 3 and sick.steps["rewards/accuracy/mean"] == [0.5, 0.5, None, None]
    assert sick.accuracy[-1] == 0.0 and sound.diverged_at is None


def test_samples_are_drawn_in_the_last_evaluation_alone(tmp_path):
    seen = []
    make = FakeMake()
    study = tiny_study(final_completions=4, learning_rates=[1e-4], tuning_seeds=0)
    make.on_step = lambda trainer: seen.append(trainer)
    computed(tmp_path, study, make)
    assert seen[-1].samples == [0, 0, 4]


def test_a_killed_study_repeats_no_finished_run_and_resumes_the_batch(tmp_path):
    study = tiny_study(runs_per_batch=2)
    steps = []

    def interrupt(trainer):
        steps.append(trainer.done)
        if len(steps) == 7:  # in the third step of the second batch
            os.kill(os.getpid(), signal.SIGINT)

    first = FakeMake(interrupt)
    assert not Runner(Store(tmp_path, study), first, QUIET).run()
    assert len(files(tmp_path)) == 2 and len(list((tmp_path / "batches").glob("*.pt"))) == 1
    steps.clear()
    second = computed(tmp_path, study, FakeMake(lambda trainer: steps.append(trainer.done)))
    assert steps[0] == 3  # it goes on after three steps
    assert first.made[1][0] == second.made[0][0]
    repeated = {run.name for run in first.made[0][0]} & {run.name for runs, _ in second.made for run in runs}
    assert not repeated
    whole = tmp_path / "whole"
    computed(whole, study)
    for name in files(whole):
        one, other = (json.loads((at / "runs" / f"{name}.json").read_text()) for at in (tmp_path, whole))
        assert one | {"facts": None} == other | {"facts": None}


def test_a_crash_between_the_files_of_a_batch_costs_the_missing_runs_alone(tmp_path):
    study = tiny_study(learning_rates=[1e-4], tuning_seeds=0)
    computed(tmp_path, study)
    (tmp_path / "runs" / "aqn-lr0.0001-s1.json").unlink()
    make = computed(tmp_path, study)
    assert [[run.name for run in runs] for runs, _ in make.made] == [["aqn-lr0.0001-s1"]]


def test_a_batch_of_other_runs_begins_anew(tmp_path, capsys):
    study = tiny_study(arms={"none": None}, comparisons={}, learning_rates=[1e-4], tuning_seeds=0)
    store, steps = Store(tmp_path, study), []
    kept = Checkpoint(["a", "b"], [], [], {"done": 2}, 1.0, [None, None], store.commit)
    store.save_checkpoint("none-test-0", kept)
    assert store.checkpoint("none-test-0") == kept and store.checkpoint("y") is None
    make = FakeMake(lambda trainer: steps.append(trainer.done))
    assert Runner(store, make, Console(width=200)).run()
    assert steps == [0, 1, 2, 3]
    assert "begins anew, as what was kept of it is of other runs." in capsys.readouterr().out


def test_processes_share_a_folder_by_claiming_batches(tmp_path, capsys):
    study = tiny_study(learning_rates=[1e-4], tuning_seeds=0, runs_per_batch=32)
    other = Store(tmp_path, study)
    with other.claimed("none-test-0") as mine:
        assert mine
        with Store(tmp_path, study).claimed("none-test-0") as second:
            assert not second
        make = FakeMake()
        assert Runner(Store(tmp_path, study), make, Console(width=200)).run()
    assert [runs[0].arm.name for runs, _ in make.made] == ["aqn"]
    assert "Other processes compute the 3 runs that are left." in capsys.readouterr().out


def test_a_batch_that_fails_is_left_out_and_raised_at_the_end(tmp_path, capsys):
    study = tiny_study(learning_rates=[1e-4], tuning_seeds=0, arms={
        "bad": {"noise": True, "noise_stages": 2}, "good": None, "follows": {"match_entropy": "bad"},
    }, comparisons={})  # fmt: skip

    def fail(trainer):
        if trainer.runs[0].arm.name == "bad":
            raise ValueError("no such product")

    make = FakeMake(fail)
    with pytest.raises(ValueError, match="no such product"):
        Runner(Store(tmp_path, study), make, Console(width=200)).run()
    assert [runs[0].arm.name for runs, _ in make.made] == ["bad", "good"]
    assert "bad, test, learning rate 0.0001 failed: no such product" in capsys.readouterr().out
    assert len(files(tmp_path)) == 3
    assert len(computed(tmp_path, study).made) == 2  # the mended arm, and the one that follows it


@pytest.mark.parametrize("times", [1, 2])
def test_a_batch_without_memory_has_a_second_turn_after_the_others(tmp_path, capsys, times):
    study = tiny_study(
        learning_rates=[1e-4], tuning_seeds=0, comparisons={}, arms={"big": None, "small": None}
    )
    left, held = [times], []

    class Held:
        """Stands for a batch's tensors."""

    def fail(trainer):
        if trainer.runs[0].arm.name == "big" and left[0]:
            left[0] -= 1
            tensors = Held()
            held.append(weakref.ref(tensors))
            raise torch.OutOfMemoryError("out of memory")

    make = FakeMake(fail)
    runner = Runner(Store(tmp_path, study), make, Console(width=200))
    if times == 2:
        with pytest.raises(QeRLError, match="GPU memory ran out in big"):
            runner.run()
    else:
        assert runner.run()
    assert [runs[0].arm.name for runs, _ in make.made] == ["big", "small", "big"]
    assert len(files(tmp_path)) == (3 if times == 2 else 6)
    assert all(tensors() is None for tensors in held)  # what failed is not kept in memory
    assert capsys.readouterr().out.count("It is tried again after the others.") == 1


FOLLOWS = {"warm": {"match_entropy": "aqn"}, "aqn": {"noise": True, "noise_stages": 2}}


def test_an_arm_waits_for_the_runs_that_it_follows_seed_by_seed(tmp_path):
    study = tiny_study(arms=FOLLOWS, comparisons={})
    plan = make_plan(Store(tmp_path, study))
    assert {batch.runs[0].arm.name for batch in plan.batches} == {"aqn"} and plan.waiting
    assert plan.open == 2 * (4 + 3)
    make = computed(tmp_path, study)
    pairs = [pair for runs, followed in make.made for pair in zip(runs, followed, strict=True)]
    followed = {(run.seed, run.learning_rate): one for run, one in pairs if run.arm.name == "warm"}
    assert followed[1001, 1e-4].run == "aqn-lr0.0001-s1001"  # where rates are compared, at the same one
    assert followed[1001, 1e-4].entropy == [2.0, 3.0, 4.0, 5.0] and followed[1001, 1e-4].sigma == [
        0,
        0,
        0.5,
        0.5,
    ]
    assert followed[2, 2e-4].run == "aqn-lr0.0002-s2" and followed[2, 2e-4].entropy == [3.0, 4.0, 5.0, 6.0]
    assert all(one is None for run, one in pairs if run.arm.name == "aqn")
    plain = json.loads((tmp_path / "runs" / "warm-lr0.0002-s2.json").read_text())
    assert plain["followed"] == vars(followed[2, 2e-4])
    assert Store(tmp_path, study).write_results() == read_results(tmp_path / RESULTS_FILE)


def test_other_seeds_and_rates_of_a_study_do_not_change_what_a_run_followed(tmp_path):
    computed(tmp_path, tiny_study(arms=FOLLOWS, comparisons={}))
    make = computed(tmp_path, tiny_study(arms=FOLLOWS, comparisons={}, test_seeds=4, tuning_seeds=3))
    assert {(run.arm.name, run.seed) for runs, _ in make.made for run in runs} == {
        (arm, seed) for arm in ("aqn", "warm") for seed in (3, 1002)
    }


def test_runs_that_followed_other_curves_are_computed_again_and_do_not_count(tmp_path, capsys):
    study = tiny_study(arms=FOLLOWS, comparisons={}, learning_rates=[1e-4], tuning_seeds=0)
    computed(tmp_path, study)
    path = tmp_path / "runs" / "aqn-lr0.0001-s1.json"
    changed = json.loads(path.read_text())
    changed["steps"]["rollout/entropy"][2] = 9.0
    path.write_text(json.dumps(changed))
    assert [one.run.seed for one in Store(tmp_path, study).results().tested("warm")] == [0, 2]
    make = FakeMake()
    assert Runner(Store(tmp_path, study), make, Console(width=200)).run()
    assert [run.name for runs, _ in make.made for run in runs] == ["warm-lr0.0001-s1"]
    assert "1 runs are computed again, as they followed other curves of aqn" in capsys.readouterr().out
    assert Store(tmp_path, study).results().tested("warm")[1].followed.entropy[2] == 9.0


def test_a_checkpoint_of_runs_that_followed_other_curves_is_not_gone_on_from(tmp_path, capsys):
    study = tiny_study(arms=FOLLOWS, comparisons={}, learning_rates=[1e-4], tuning_seeds=0)

    def interrupt(trainer):
        if trainer.runs[0].arm.name == "warm" and trainer.done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    assert not Runner(Store(tmp_path, study), FakeMake(interrupt), QUIET).run()
    kept = Store(tmp_path, study).checkpoint("warm-test-0")
    assert kept.followed[1]["run"] == "aqn-lr0.0001-s1" and len(kept.records) == 3
    kept.followed[1]["entropy"][0] = 7.0
    Store(tmp_path, study).save_checkpoint("warm-test-0", kept)
    assert Runner(Store(tmp_path, study), FakeMake(), Console(width=200)).run()
    assert "is of runs that followed other curves of entropy." in capsys.readouterr().out


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
    with pytest.raises(
        QeRLError, match="of another model than what m is now, whose fingerprint is g and not f"
    ):
        Runner(grown, other, QUIET).run()
    assert other.made == []


def test_another_commit_is_said_and_repeats_nothing_that_is_finished(tmp_path, capsys):
    study = tiny_study(learning_rates=[1e-4], tuning_seeds=0)
    assert Runner(at_commit(tmp_path, study, "aaaaaaa"), FakeMake(), QUIET).run()
    make = FakeMake()
    grown = tiny_study(learning_rates=[1e-4], tuning_seeds=0, test_seeds=4)
    assert Runner(at_commit(tmp_path, grown, "bbbbbbb"), make, Console(width=300)).run()
    assert "holds 6 runs of commit aaaaaaa, and this is bbbbbbb; arms that --again" in capsys.readouterr().out
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
    with pytest.raises(QeRLError, match="There is no arm 'nine' to compute again"):
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
    assert "kept of it is of commit aaaaaaa, and this is bbbbbbb." in capsys.readouterr().out


def test_a_sweep_runs_all_seeds_at_all_rates(tmp_path):
    study = tiny_study(tuning_seeds=0, comparisons={}, arms={"none": None})
    computed(tmp_path, study)
    assert len(files(tmp_path)) == 6
    results = Store(tmp_path, study).results()
    assert results.rate("none") is None and len(results.of("none", 1e-4)) == 3


def test_an_arm_with_a_rate_of_its_own_is_not_tuned(tmp_path):
    study = tiny_study(arms={"none": None, "slow": {"learning_rate": 5e-5}}, comparisons={})
    make = computed(tmp_path, study)
    slow = [(run.seed, run.learning_rate) for runs, _ in make.made for run in runs if run.arm.name == "slow"]
    assert slow == [(0, 5e-5), (1, 5e-5), (2, 5e-5)]
    results = Store(tmp_path, study).results()
    assert results.rate("slow") == 5e-5 and len(results.tested("slow")) == 3
    assert [study.count(arm) for arm in study.arms.values()] == [4 + 3, 3]


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
