"""The studies of this project: each of their arms trains and is scored, on a tiny model."""

import pytest

from lab.study.batched.trainer import BatchedTrainer, Settings
from lab.study.followed import Followed
from lab.study.library import FOLDER
from lab.study.plan import make_plan
from lab.study.spec import joined, read_study
from lab.study.store import Store
from qerl.settings.library import read_mapping
from tests.support.batched import TOKENIZER, Sums, tiny_base

pytestmark = pytest.mark.slow

ORDER = ("noise", "designs", "formats", "ablations")


def values(*names):
    found = {}
    for name in names:
        found = joined(found, read_mapping(FOLDER / f"{name}.yaml", "study"), name)
    return found


@pytest.mark.parametrize("task", ["wp12", "wp1"])
@pytest.mark.parametrize(("files", "batches"), [(1, 9), (3, 26), (4, 32)])
def test_each_arm_is_one_batch_as_the_readme_says(files, batches, task, tmp_path):
    study = read_study("x", values(*ORDER[:files], task))
    plan = make_plan(Store(tmp_path, study))
    assert [arm.name for arm in study.arms.values() if arm.match_entropy] == ["temperature"]
    assert len(plan.batches) + 1 == batches and plan.open == 32 * batches and plan.waiting
    assert all(len(batch.runs) == 32 for batch in plan.batches)


ARMS = read_study("x", values(*ORDER, "wp12") | {"steps": 5, "eval_steps": 5})


@pytest.mark.parametrize("name", ARMS.arms)
def test_each_arm_trains(name):
    arm = ARMS.arms[name]
    runs = ARMS.test_runs(arm, None)[:2]
    settings = Settings(steps=5, prompts_per_step=2, samples_per_prompt=8, max_completion_length=4)
    followed = [Followed("x", [3.0] * 5, [0.0, 0.1, 0.1, 0.1, 0.1])] * 2 if arm.match_entropy else None
    batch = BatchedTrainer(tiny_base(), TOKENIZER, Sums(), runs, settings, followed)
    start = batch.evaluate(Sums().test())
    clean, noisy = batch.step()[0], batch.step()[0]  # of five stages the first is clean
    end = batch.evaluate(Sums().test(), 4)
    assert start[0] == start[1] and {"accuracy", "pass@4", "distinct"} <= end[0].keys()
    assert end[0]["entropy"] != start[0]["entropy"] and not noisy["diverged"]
    assert (noisy["noise/sigma"] > 0) == arm.scheduled and (clean["noise/sigma"] == 0)
    assert noisy["learning_rate"] == pytest.approx(arm.learning_rate or 2e-4)
    assert ("temperature/error" in noisy) == bool(arm.match_entropy)
    assert ("only_noisy" in noisy) == (arm.noise_share < 1)
