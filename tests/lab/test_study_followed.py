"""Arms that follow the curves of another: they wait for it, and are computed again where it changed."""

import json
import os
import signal

from rich.console import Console

from lab.study.plan import make_plan
from lab.study.results import RESULTS_FILE, read_results
from lab.study.runner import Runner
from lab.study.store import Store
from tests.support.study import QUIET, FakeMake, computed, tiny_study

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
    assert (
        "1 runs are computed again, as the entropy curves of aqn, which they followed, have changed"
        in capsys.readouterr().out
    )
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
