"""A study's folder and what computes it: which batches, in which order, and what survives a kill."""

import json
import os
import signal
import weakref

import pytest
import torch
from rich.console import Console

from lab.study.results import RESULTS_FILE, RunResult, read_results
from lab.study.runner import Runner
from lab.study.store import Checkpoint, Store
from qerl.errors import QeRLError
from tests.support.study import QUIET, FakeMake, accuracy, computed, files, tiny_study


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
    assert "starts again from step 0: its checkpoint is of other runs." in capsys.readouterr().out


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
