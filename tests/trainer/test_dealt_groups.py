"""Two processes whose groups change places: the same gradient, and a resume to the bit."""

import json

import pytest
import torch

from tests.support.runs import results, run_python, write_recipe

pytestmark = pytest.mark.slow

STEPS = {
    "algorithm": "dapo",
    "signal": "reward",  # random text is never right
    "max_completion_length": 24,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,  # two steps, of four groups of each process
    "task_options": {"examples": 0, "train_size": 32, "test_size": 4},
    "lora_dropout": 0.0,
    "max_steps": 3,
    "noise_stages": 2,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 1,
}
REWARD = """import json, os

import qerl.trainer.balance

FOUND = []
KEEP = {keep}
inner = qerl.trainer.balance.moves


def moves(owners):
    FOUND.append(0 if KEEP else len(inner(owners)))
    with open("{file}." + os.environ["RANK"], "w") as file:
        json.dump(FOUND, file)
    return [] if KEEP else inner(owners)


qerl.trainer.balance.moves = moves


def first(completions, **_):  # of the first process only
    return [float(i % 2) * (os.environ["RANK"] == "0") for i in range(len(completions))]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_runs):
    """Folders of three runs: as dealt, as drawn, and the first one resumed from its first step."""
    folder = tmp_path_factory.mktemp("dealt")
    recipes = []
    for name in ("dealt", "drawn", "resumed"):
        file = folder / f"{name}.py"
        file.write_text(REWARD.format(keep=name == "drawn", file=file.with_suffix(".moves")))
        settings = STEPS | {"reward_files": [f"{file}:first"]}
        if name == "resumed":
            settings["resume_from_checkpoint"] = str(folder / "dealt" / "checkpoint-1")
        recipes.append(write_recipe(tiny_runs, folder / name, settings))
    run_python("-m", "tests.support.two_processes", *recipes)
    return folder


def moved(runs, name):
    """Groups that changed places, of each optimizer step that was sampled, as both processes saw it."""
    first, second = (json.loads((runs / f"{name}.moves.{rank}").read_text()) for rank in (0, 1))
    assert first == second
    return first


def test_the_gradient_is_that_of_the_groups_as_they_were_drawn(runs):
    """All groups with a signal are of the first process; the second computes some of them."""
    assert all(moved(runs, "dealt")[:2]) and not any(moved(runs, "drawn"))
    (dealt, _), (drawn, _) = results(runs / "dealt"), results(runs / "drawn")
    for row, other in zip(dealt[:3], drawn[:3], strict=True):
        for name in ("loss", "grad_norm", "sampling/ratio/max", "entropy"):
            assert row[name] == pytest.approx(other[name], rel=1e-5), name


def test_a_resume_goes_on_with_the_rollout_as_it_was_dealt(runs):
    whole, resumed = results(runs / "dealt")[1], results(runs / "resumed")[1]
    assert len(moved(runs, "resumed")) == 2, "the half-used rollout was dealt before"
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
