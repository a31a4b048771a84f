"""Runs by plans: what that of distillation asks, that a folder goes on, and what tables say of results."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.__main__ import main
from lab.trained import runs
from lab.trained.plan import Tuning, read_plan
from lab.writers import distilled_tables
from qerl.errors import QeRLError
from qerl.fp4.quantize import quantize_checkpoint
from qerl.lora.adapter import add_lora

SHORT = ("wp1-rl", "wp12-16bit", "wp12-reverse", "wp1-taught", "wp12-reverse-rl")
"""Arms of each kind: RL, not trained, a teacher that is a model, one that is an adapter, RL behind it."""


def small(arm):
    """An arm whose steps and completions are short."""
    sizes = {"max_completion_length": 8, "num_generations": 4, "per_device_train_batch_size": 8}
    return replace(arm, settings={**arm.settings, **sizes, "gradient_accumulation_steps": 1})


def test_the_plan_trains_half_as_long_with_a_teacher_and_asks_the_same_problems_of_a_seed(folder, tiny_model):
    plan = read_plan("distilled")
    assert plan.seeds == tuple(range(200, 208)) and plan.held_out >= 1024
    for name, arm in plan.arms.items():
        for other in filter(None, (arm.teacher, arm.begins_with)):
            assert list(plan.arms).index(other) < list(plan.arms).index(name)
            folder.keep({"arm": other, "seed": 203})
            add_lora(tiny_model("llama"), 16, 32, 0.0).save_pretrained(folder.of(other, 203))
    assert set(plan.tuned()) < set(plan.tuning.arms)
    assert plan.later_seeds == tuple(range(208, 216))
    assert not {*plan.tuning.seeds} & {*plan.seeds, *plan.later_seeds}
    rates = {"wp1-taught": 3e-3, "wp12-reverse": 4e-3}
    found = {name: runs.settings_of(plan, name, 203, folder, rates) for name in plan.arms}
    for name, config in found.items():
        level = name.split("-")[0]
        examples = {"wp1": 1, "wp12": 2}[level]
        assert config.task_options == {
            "level": level, "examples": examples, "seed": 203, "test_size": plan.held_out
        }  # fmt: skip
        assert config.seed == 203 and not config.noise and config.num_generations == 8
        assert (config.weights == "bf16") == name.endswith("16bit") == (config.model == str(folder.model))
        assert ("rtn" in name) == (config.rounding == "rtn")
        of_teacher = 3e-3 if name.startswith("wp1-taught") else 4e-3
        assert config.learning_rate == (of_teacher if config.algorithm == "distill" else 2e-4)
        assert (config.lr_scheduler_type == "linear") == name.endswith("falling")
    taught, rl = found["wp1-taught"], found["wp1-rl"]
    assert taught.max_steps == rl.max_steps / 2 and taught.teacher == f"adapter:{folder.of('wp1-rl', 203)}"
    assert taught.distillation_alpha == found["wp12-reverse"].distillation_alpha == 1.0
    assert found["wp12-forward"].distillation_alpha == 0.0
    assert found["wp12-reverse"].teacher == str(folder.model)
    assert found["wp12-reverse"].teacher_weights == "bf16"
    after = found["wp12-reverse-rl"]
    assert after.adapter == str(folder.of("wp12-reverse", 203)) and after.algorithm is None
    assert after.max_steps + found["wp12-reverse"].max_steps == found["wp12-rl"].max_steps


def test_an_arm_whose_teacher_has_not_run_is_refused(folder):
    with pytest.raises(QeRLError, match="wp1-taught needs the adapter of wp1-rl; name both with --arms"):
        runs.settings_of(read_plan("distilled"), "wp1-taught", 203, folder, {"wp1-taught": 1e-3})


def test_a_model_is_packed_once_by_whoever_asks_and_what_a_killed_process_left_is_removed(
    folder, monkeypatch
):
    (folder.packed_in / ".rtn.partial").mkdir(parents=True)
    made = []

    def once(*args, **kwargs):
        made.append(args)
        return quantize_checkpoint(*args, **kwargs)

    monkeypatch.setattr(runs, "quantize_checkpoint", once)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(folder.packed, ["rtn", "rtn"]))
    assert found == [folder.packed_in / "rtn"] * 2 and len(made) == 1
    assert (found[0] / "config.json").is_file() and not (folder.packed_in / ".rtn.partial").exists()


@pytest.mark.slow
def test_a_seed_runs_whole_and_is_not_computed_again(folder, monkeypatch, capsys):
    plan = replace(read_plan("distilled"), seeds=(203,), held_out=4)
    # No answer of a tiny model is right, so its RL moves nothing that could be taught.
    taught = replace(plan.arms["wp1-taught"], teacher="wp12-reverse")
    plan = replace(plan, arms={name: small({**plan.arms, "wp1-taught": taught}[name]) for name in SHORT})
    job = runs.Job(203, plan, SHORT, folder, dict.fromkeys(plan.tuned(), 1e-3), steps=2)
    runs.run_seed(job)
    rows = {row["arm"]: row for row in runs.gathered(plan, folder)}
    assert tuple(rows) == SHORT
    assert rows["wp12-16bit"]["steps"] == [0]
    for name in SHORT:
        assert len(rows[name]["accuracy"]) == len(rows[name]["steps"]) and rows[name]["held_out"] == 4
        assert rows[name]["steps"] in ([0], [0, 2]) and {"commit", "date", "machine"} <= rows[name].keys()
    first, second = rows["wp12-reverse"]["divergence"]
    assert first > 0 and second > 0  # four bits are not sixteen
    assert 0 < rows["wp1-taught"]["divergence"][0] < 1  # the base, and two steps from it
    assert "divergence" not in rows["wp1-rl"]
    monkeypatch.setattr(runs, "learn", None)
    for name in SHORT:
        shutil.rmtree(folder.of(name, 203), ignore_errors=True)
    runs.run_seed(job)
    with pytest.raises(QeRLError, match=r"wp1-rl-203\.json is of another run: its held_out is 4 and not 5"):
        runs.run_seed(replace(job, plan=replace(plan, held_out=5)))
    folder.keep({"arm": "wp1-rl", "seed": 203})
    with pytest.raises(QeRLError, match=r"wp1-rl-203\.json is of another run: its task is unknown and not"):
        runs.run_seed(job)


def test_the_command_computes_what_it_is_told_and_writes_the_results(folder, tmp_path, monkeypatch):
    told = []

    def compute(plan, folder, arms, processes, steps):
        told.append((arms, processes, steps, plan.held_out))
        for seed in plan.seeds:
            folder.keep({"arm": "wp12-16bit", "seed": seed})

    monkeypatch.setattr(runs, "compute", compute)
    where = ["--model", str(folder.model), "--output_dir", str(tmp_path), "--out", str(tmp_path / "out.json")]
    words = [*where, "--processes", "2", "--seeds", "3", "4", "--arms", "wp12-16bit", "--held_out", "4"]
    assert not main(["trained", "distilled", *words])
    assert told == [(["wp12-16bit"], 2, None, 4)]
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(row["arm"], row["seed"]) for row in found["rows"]] == [("wp12-16bit", 3), ("wp12-16bit", 4)]
    assert found["command"] == "python -m lab trained distilled --processes 2"


@pytest.mark.slow
def test_the_rates_of_the_tuning_are_those_of_the_runs(folder):
    """Processes: two rates are tried, and what is chosen trains."""
    tuning = Tuning((5,), (1e-9, 1e-2), ("wp12-reverse",))
    arms = {name: replace(small(arm), rate_of=None) for name, arm in read_plan("distilled").arms.items()}
    arms["wp12-reverse"] = replace(arms["wp12-reverse"], rate_of="wp12-reverse")
    plan = replace(read_plan("distilled"), seeds=(203,), held_out=2, tuning=tuning, arms=arms)
    runs.compute(plan, folder, ["wp12-reverse"], processes=2, steps=1)
    tried = [row for row in runs.gathered(plan, folder) if row["tuning"]]
    assert [(row["seed"], row["learning_rate"]) for row in tried] == [(5, 1e-9), (5, 1e-2)]
    assert folder.finished("wp12-reverse", 203)["learning_rate"] == 1e-9  # a tiny model is never right


def test_the_highest_mean_decides_a_rate_and_the_lowest_rate_a_tie(folder):
    plan = replace(read_plan("distilled"), tuning=Tuning((5, 6), (1e-3, 1e-4, 1e-2), ()))
    ends = {1e-4: (0.5, 0.1), 1e-3: (0.3, 0.4), 1e-2: (0.4, 0.3)}
    for rate, of_rate in ends.items():
        (folder.tuning(rate).path / "runs").mkdir(parents=True)
        for seed, end in zip((5, 6), of_rate, strict=True):
            folder.tuning(rate).keep({"arm": "wp1-taught", "seed": seed, "accuracy": [0.9, end]})
            folder.tuning(rate).keep({"arm": "wp12-reverse", "seed": seed, "accuracy": [0.9, rate]})
    assert runs.chosen(plan, folder) == {"wp1-taught": 1e-3, "wp12-reverse": 1e-2}
    (folder.tuning(1e-4).path / "runs" / "wp1-taught-6.json").unlink()
    with pytest.raises(QeRLError, match=r"tuning-0\.0001 lacks runs of wp1-taught; run the command again"):
        runs.chosen(plan, folder)


def test_the_command_knows_its_arms(capsys):
    assert main(["trained", "distilled", "--output_dir", "x", "--arms", "wp13"]) == 2
    assert "The plan has no arm 'wp13'; it has wp1-rl, " in capsys.readouterr().err


def test_scores_are_of_the_weights_at_their_steps():
    model = torch.nn.Linear(1, 1)
    adapters = runs._Adapters(model, 2)
    state = type("State", (), {"global_step": 0, "max_steps": 5})()
    adapters.on_train_begin(None, state, None)
    first = model.weight.item()
    for step in range(1, 6):
        state.global_step = step
        with torch.no_grad():
            model.weight.fill_(step)
        adapters.on_step_end(None, state, None)
    assert adapters.steps == [0, 2, 4, 5]
    assert adapters.scored(lambda: model.weight.item()) == [first, 2, 4, 5]
    assert model.weight.item() == 5


def row(arm, seed, accuracy, steps, **fields):  # as a result file has it
    shared = {"arm": arm, "seed": seed, "learning_rate": 2e-4, "tuning": False}
    return {**shared, "accuracy": accuracy, "steps": steps, **fields}


def curve(most, at, end):
    """Scores every two steps that reach their end at a step."""
    return [most if step >= at else 0.2 for step in range(0, end + 2, 2)]


def test_the_table_of_a_taught_adapter_compares_it_with_its_teacher(results):
    rows = []
    for seed, (rl_at, taught_at) in enumerate([(20, 10), (40, 10), (30, 30)]):
        rows.append(row("wp1-rl", seed, curve(0.9, rl_at, 40), list(range(0, 42, 2))))
        # The third never has it: 22 of its 20 steps count.
        rows.append(row("wp1-taught", seed, curve(0.895, taught_at, 20), list(range(0, 22, 2))))
    rows.append(row("wp1-taught", 0, [0.0, 0.0], [0, 20], tuning=True, learning_rate=1.0))
    results(distilled_tables.NAME, rows)
    said = distilled_tables.TABLES["distilled-adapter"]()
    assert "| RL, 40 steps | 0.200 | 0.900 (0.900 to 0.900) | 30.0 (20 to 40) | 3 of 3 |" in said
    assert "| 15 | 0.200 | " not in said
    taught = np.array([0.895, 0.895, 0.2])
    assert f"| taught by its adapter, 20 steps | 0.200 | {taught.mean():.3f} " in said
    assert "| 14.0 (10 to 22) | 2 of 3 |" in said
    ratio = np.mean([10 / 20, 10 / 40, 22 / 30])
    assert f"first step, taught over RL: {ratio:.2f} (" in said
    assert f"After 20 steps minus its teacher at its end: {(taught - 0.9).mean():+.3f} (" in said
    assert "3 seeds" in said and "abcdef0" in said
    assert "learning rates 0.0002 of RL, 0.0002 with an adapter as teacher." in said


def test_the_table_of_bits_gives_the_share_of_the_gap_that_is_closed(results):
    rows = []
    for seed, (sixteen, before, after) in enumerate([(0.3, 0.2, 0.26), (0.34, 0.18, 0.28)]):
        rows.append(row("wp12-16bit", seed, [sixteen], [0]))
        divergence = [0.2, *[0.1] * 15, *[0.05] * 5]
        rows.append(row("wp12-reverse", seed, [before, 0.25, after], [0, 10, 20], divergence=divergence))
    results(distilled_tables.NAME, rows)
    said = distilled_tables.TABLES["distilled-bits"]()
    share = (0.06 + 0.10) / (0.10 + 0.16)
    line = next(line for line in said.splitlines() if line.startswith("| wp12, reverse KL |"))
    assert f"| 0.320 | 0.190 | 0.270 | {100 * share:.0f} % (" in line and "| 0.200 | 0.050 | 2 |" in line
    assert "| wp1, reverse KL" not in said and "Not run: wp1, reverse KL; wp12, f" in said
    assert distilled_tables.NUMBERS["distilled-share-wp12"]().startswith(f"{100 * share:.0f} % (")
    assert distilled_tables.NUMBERS["distilled-share-wp1"]() == "not run"
    results(
        distilled_tables.NAME,
        [{**row, "accuracy": [0.2]} if row["arm"] == "wp12-16bit" else row for row in rows],
    )
    assert distilled_tables.NUMBERS["distilled-share-wp12"]().endswith(")")
    results(
        distilled_tables.NAME,
        [{**row, "accuracy": [0.1]} if row["arm"] == "wp12-16bit" else row for row in rows],
    )
    assert distilled_tables.NUMBERS["distilled-share-wp12"]() == "no gap"


def test_the_table_of_rl_behind_a_distillation_is_paired_and_corrected(results):
    rows = []
    for seed in range(6):
        rows.append(row("wp12-rl", seed, [0.2, 0.4], [0, 40]))
        rows.append(row("wp12-reverse-rl", seed, [0.3, 0.45 + 0.001 * seed], [0, 20]))
    results(distilled_tables.NAME, rows)
    said = distilled_tables.TABLES["distilled-rl"]()
    line = next(line for line in said.splitlines() if line.startswith("| wp12 |"))
    assert "| 0.400 (0.400 to 0.400) |" in line and "| +0.052 (+0.0" in line
    assert "| 0.0312 | 0.0625 | 6 |" in line  # 2 of 2 ** 6 signs; times the two tasks that are planned
    assert "Not run: wp1." in said
