"""The comparison of refilled rows with the synchronous run: its plan, task, clock, tables and their audit."""

from dataclasses import fields, replace
from math import ceil

import numpy as np
import pytest
from safetensors.torch import load

from bench.lengths import draw_lengths
from bench.result import read_rows
from bench.tail import nvfp4_steps
from lab.audit.cells import Cell
from lab.audit.command import cells
from lab.study.statistics import hodges_lehmann, hodges_lehmann_interval
from lab.trained import clock, runs
from lab.trained.chains import Chains
from lab.trained.plan import read_plan
from lab.writers import refilled_rates, refilled_tables
from qerl.lora.adapter import add_lora
from qerl.rollout.paged.limits import ROW_COUNTS

ARMS = ("synchronous", "refilled-2", "refilled-4", "refilled-1", "uncorrected-4")


def test_arms_differ_in_what_the_plan_says_alone(folder, tiny_model, monkeypatch):
    monkeypatch.setattr(runs.Folder, "packed", lambda self, rounding: self.model)
    plan = read_plan("refilled")
    assert plan.seeds == tuple(range(460, 492)) and tuple(plan.arms) == ("warm", *ARMS)
    warm = runs.settings_of(plan, "warm", 463, folder, {})
    assert warm.algorithm == "sft" and warm.weights == "nvfp4" and warm.lora_r == 16
    folder.keep({"arm": "warm", "seed": 463})
    add_lora(tiny_model("llama"), 16, 32, 0.0).save_pretrained(folder.of("warm", 463))
    configs = {name: runs.settings_of(plan, name, 463, folder, {}) for name in ARMS}
    names = {field.name for field in fields(warm)} - {"output_dir", "logging_dir"}
    found = {arm: {name: getattr(config, name) for name in names} for arm, config in configs.items()}
    apart = {
        arm: {name: value for name, value in own.items() if value != found["synchronous"][name]}
        for arm, own in found.items()
    }
    assert found["synchronous"]["loss_type"] == "dppo_kl" and found["synchronous"]["max_staleness"] == 0
    assert found["synchronous"]["adapter"] == str(folder.of("warm", 463))
    for steps in (1, 2, 4):
        assert apart[f"refilled-{steps}"] == {"max_staleness": steps}
    uncorrected = found["uncorrected-4"]
    bounds = [uncorrected[f"vllm_importance_sampling_clip_{side}"] for side in ("min", "max")]
    assert uncorrected["max_staleness"] == 4 and uncorrected["use_rollout_logprobs"] is False
    assert np.allclose(bounds, 1.0, atol=2e-4)


def test_problems_have_one_to_eight_lines_and_right_ones_are_right():
    task = Chains(seed=463, train_size=256, test_size=64)
    rows, held_out = task.train(), task.test()
    solved = task.demonstrations()["completion"]
    lines = [said[0]["content"].count("\n") for said in solved]
    assert lines == rows["steps"] and {*lines} == {1, 2, 3, 4, 6, 8}
    assert 0.2 < np.mean(np.array(lines) == 1) < 0.5
    assert task.rewards[0](rows["prompt"], solved, answer=rows["answer"], steps=rows["steps"]) == [1.0] * 256
    assert not {p[-1]["content"] for p in rows["prompt"]} & {p[-1]["content"] for p in held_out["prompt"]}


def test_a_synchronous_step_takes_its_longest_sample_and_what_the_measured_one_took_beside():
    lengths = [[5] * 60 + [21] * 4, [8] * 64]
    found = clock.step_seconds(lengths, 8, 0)
    measured = nvfp4_steps("rollout-7b-h200")
    (step,) = read_rows("step-7b-lognormal-h200")
    per_token = step["update_s"] / step["tokens"]
    # 50 tokens need 4 rounds of 16 steps, 210 need 14, 80 need 5; up to 8 rows no decode step is smaller.
    decode = [16e-3 * (4 * measured[64] + 10 * measured[8]), 16e-3 * 5 * measured[64]]
    rest = [
        seconds - d - per_token * 10 * sum(t) for seconds, d, t in zip(found, decode, lengths, strict=True)
    ]
    assert rest[0] == pytest.approx(rest[1]) and 0 < rest[0] < step["rollout_s"]
    whole = rest[0] + sum(
        16e-3 * np.interp(rows, sorted(measured), [measured[n] for n in sorted(measured)])
        for rows in _rows_by_round()
    )
    assert whole == pytest.approx(step["rollout_s"], rel=1e-3)


def _rows_by_round():
    """Rows of the step of each round of the measured rollout: the least that hold what still runs."""
    needed = [ceil(n / 16) for n in draw_lengths("lognormal:400", 128, 1024)]
    running = [max(8, sum(n > done for n in needed)) for done in range(max(needed))]
    return [min(count for count in ROW_COUNTS if count >= rows) for rows in running]


def test_refilled_steps_take_less_where_lengths_are_spread():
    draw = np.random.default_rng(0)
    lengths = draw.integers(8, 96, (20, 64)).tolist()
    alone, early = (sum(clock.step_seconds(lengths, 8, steps)) for steps in (0, 2))
    assert early < 0.9 * alone
    equal = [[16] * 64] * 20
    assert clock.step_seconds(equal, 8, 2) == pytest.approx(clock.step_seconds(equal, 8, 0))


@pytest.mark.slow
def test_a_refilled_run_has_old_tokens_and_is_not_disturbed_by_its_scores(folder):
    """No answer of a tiny model is right, so it learns to keep its entropy."""
    plan = replace(read_plan("refilled"), held_out=4)
    short = {
        "max_completion_length": 24, "num_generations": 4, "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1, "max_steps": 4, "learning_rate": 1e-2,
        "entropy_coef": 1.0,
    }  # fmt: skip
    weights = {}
    for every in (1, 4):
        arms = {
            name: replace(plan.arms[name], begins_with=None, every=every,
                          settings={**plan.arms[name].settings, **short})
            for name in ("synchronous", "refilled-2")
        }  # fmt: skip
        own = replace(folder, path=folder.path / str(every))
        runs.run_seed(runs.Job(463, replace(plan, arms=arms), tuple(arms), own, {}))
        found = {row["arm"]: row for row in runs.gathered(replace(plan, arms=arms, seeds=(463,)), own)}
        assert "age" not in found["synchronous"] and len(found["synchronous"]["of_7b"]) == 4
        stale = found["refilled-2"]
        assert stale["steps"] == list(range(0, 5, every)) and len(stale["accuracy"]) == len(stale["steps"])
        assert 0 < max(stale["age"]) <= 2 and all(0 < tokens <= 24 * 16 for tokens in stale["tokens"])
        weights[every] = (own.of("refilled-2", 463) / "adapter_model.safetensors").read_bytes()
    assert weights[1] == weights[4]
    assert any(
        weight.any() for name, weight in load(weights[1]).items() if "lora_B" in name
    )  # it has learned


def runs_of(gains, seeds=32, seconds=2.0):
    """Runs as a result has them, of arms that end so much above the synchronous one.

    Synchronous runs have more tokens than those of other arms for even seeds, and fewer for odd ones.
    """
    draw = np.random.default_rng(1)
    found = []
    for seed in range(460, 460 + seeds):
        height = draw.normal(0.4, 0.05)
        for arm, gain in gains.items():
            curve = np.linspace(0.2, height + gain + draw.normal(0, 0.01), 6).tolist()
            stale = {} if arm == "synchronous" else {"age": [0.5, 1.5]}
            took = [3.0 if arm == "synchronous" else seconds] * 40
            more = 400 * (-1) ** seed if arm == "synchronous" else 0
            found.append(
                {"arm": arm, "seed": seed, "tuning": False, "steps": [*range(0, 41, 8)], "accuracy": curve}
                | {"effective": [0.9, None, 0.8], "of_7b": took, "tokens": [2000 + seed + more] * 40}
                | stale
            )  # fmt: skip
    return found


def page():
    said = refilled_tables.TABLES["refilled-learned"]()
    numbers = "".join(
        f"<!-- number {n} -->{make()}<!-- / -->\n" for n, make in refilled_tables.NUMBERS.items()
    )
    return f"<!-- table refilled-learned -->\n{said}<!-- /table -->\n{numbers}"


def differing(text):
    found = list(cells(text))
    assert all(isinstance(cell, Cell) for cell in found)
    return [cell.where for cell in found if cell.published != cell.found], len(found)


def test_the_table_says_what_refilled_rows_cost_at_equal_steps_and_at_equal_time(results):
    gains = {
        "synchronous": 0,
        "refilled-1": 0.0,
        "refilled-2": -0.005,
        "refilled-4": -0.1,
        "uncorrected-4": -0.2,
    }
    rows = runs_of(gains)
    results(refilled_tables.NAME, rows)
    said = refilled_tables.TABLES["refilled-learned"]()
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in gains}
    ends = {arm: np.array([row["accuracy"][-1] for row in of]) for arm, of in by_arm.items()}
    d = ends["refilled-2"] - ends["synchronous"]
    low, high = hodges_lehmann_interval(d)
    (line,) = [line for line in said.splitlines() if line.startswith("| 2 |")]
    assert f"| {hodges_lehmann(d):+.3f} ({low:+.3f} to {high:+.3f}) |" in line
    assert "| **no more than 0.02** |" in line
    # After 40 steps of 2 s a synchronous run of 3 s a step is at step 26.67 of its line.
    behind = [
        row["accuracy"][0] + (row["accuracy"][-1] - row["accuracy"][0]) * 80 / 120
        for row in by_arm["synchronous"]
    ]
    assert f"| {hodges_lehmann(ends['refilled-2'] - behind):+.3f} (" in line
    # Where the one with fewer tokens ends, the other is so far along its line.
    apart = []
    for run, other in zip(by_arm["refilled-2"], by_arm["synchronous"], strict=True):
        share = sum(run["tokens"]) / sum(other["tokens"])
        at = [
            of["accuracy"][0] + (of["accuracy"][-1] - of["accuracy"][0]) * min(1.0, far)
            for of, far in ((run, 1 / share), (other, share))
        ]
        apart.append(at[0] - at[1])
    low, high = hodges_lehmann_interval(np.array(apart))
    assert f"** | {hodges_lehmann(np.array(apart)):+.3f} ({low:+.3f} to {high:+.3f}) |" in line
    assert f"| 99 | 0.200 to {ends['refilled-2'].mean():.3f} | 0 of 32 | 1.00 | 0.850 | 2.00 |" in line
    (line,) = [line for line in said.splitlines() if line.startswith("| 4 |")]
    assert "| **costs** |" in line
    apart = ends["uncorrected-4"] - ends["refilled-4"]
    assert refilled_tables.NUMBERS["refilled-without-ratio"]().startswith(f"{hodges_lehmann(apart):+.3f} (")
    assert refilled_tables.NUMBERS["refilled-costs-4"]().endswith(", costs")


def test_equal_tokens_are_the_fewer_of_the_two_and_are_counted_by_step():
    few = {"steps": [0, 2, 4], "accuracy": [0.2, 0.3, 0.45], "tokens": [10, 10, 30, 50]}
    many = {"steps": [0, 2, 4], "accuracy": [0.2, 0.4, 0.8], "tokens": [40, 40, 20, 60]}
    # At 100 tokens one has ended; the other is 20 of 80 tokens behind its second score.
    assert refilled_tables.at_equal_tokens(few, many) == pytest.approx(0.45 - 0.5)
    assert refilled_tables.at_equal_tokens(many, few) == pytest.approx(0.5 - 0.45)


def test_the_least_sample_size_is_that_of_a_step_and_its_run_is_named(results):
    rows = runs_of({"synchronous": 0, "refilled-4": 0.0, "uncorrected-4": -0.4})
    for row in rows:
        low = {("refilled-4", 470): 0.4, ("uncorrected-4", 471): 0.4, ("uncorrected-4", 472): 0.41}
        row["effective"][1:2] = [None, low.get((row["arm"], row["seed"]), 0.7)]
    results(refilled_tables.NAME, rows)
    (last,) = [row["accuracy"][-1] for row in rows if (row["arm"], row["seed"]) == ("refilled-4", 470)]
    fell = [row for row in rows if row["arm"] == "uncorrected-4" and row["accuracy"][-1] < 0.2]
    assert {471, 472} <= {row["seed"] for row in fell}
    words = f"0.400, in a run whose accuracy went from 0.200 before RL to {last:.3f}"
    assert refilled_tables.NUMBERS["refilled-least-effective"]() == words
    assert refilled_tables.NUMBERS["refilled-as-low"]() == f"1 of {len(fell)}"
    assert differing(page())[0] == []


def test_nothing_is_claimed_behind_an_arm_without_its_claim(results):
    rows = runs_of({"synchronous": 0, "refilled-1": -0.1, "refilled-2": 0.0, "refilled-4": 0.0})
    results(refilled_tables.NAME, rows)
    said = {arm: refilled_tables.NUMBERS[f"refilled-costs-{arm}"]() for arm in "124"}
    assert [words.split("), ")[1] for words in said.values()] == ["costs", "undecided", "undecided"]
    assert "| 4, no ratio |" + 13 * " not run |" in refilled_tables.TABLES["refilled-learned"]()
    assert differing(page())[0] == []


def test_an_arm_that_lacks_a_seed_is_undecided_and_counts_in_the_correction(results):
    rows = runs_of({"synchronous": 0, "refilled-1": 0.0, "refilled-2": 0.0, "refilled-4": -0.1})
    results(refilled_tables.NAME, [row for row in rows if (row["arm"], row["seed"]) != ("refilled-1", 470)])
    found = refilled_tables.NUMBERS["refilled-costs-1"](), refilled_tables.NUMBERS["refilled-costs-2"]()
    assert all(words.endswith(", undecided") for words in found)
    (line,) = [
        line for line in refilled_tables.TABLES["refilled-learned"]().splitlines() if line.startswith("| 4 |")
    ]
    assert f"| {3 / 2**32:.3g} | 1 | **costs** |" in line
    assert differing(page())[0] == []


def test_a_claim_needs_half_the_level_of_a_study():
    """Both kinds may be false, so each p here, between .025 and .05, claims nothing."""
    steps = np.linspace(0.01, 0.03, 6)
    found = refilled_tables.claims({"refilled-1": 0 * steps, "refilled-4": -0.1 - steps}, 6)
    assert found["refilled-4"].costs == 3 / 2**6 and found["refilled-4"].verdict == "undecided"
    found = refilled_tables.claims({"refilled-1": steps[:5]}, 5)
    assert found["refilled-1"].no_more == 1 / 2**5 and found["refilled-1"].verdict == "undecided"


def test_each_kind_of_claim_is_false_as_seldom_as_it_says():
    """Normal differences with a shared arm: of nothing that costs, and of arms at the margin."""
    draw = np.random.default_rng(0)
    shared, own = draw.normal(0, 0.03, (400, 1)), draw.normal(0, 0.03, (400, 3))
    free, at_margin = (
        refilled_rates.rates(shared + own, centres, 16, 300)
        for centres in ((0.0, 0.0, 0.0), (-0.02, -0.02, -0.02))
    )
    assert 0 < free["any_costs"] < 0.06 and 0 < at_margin["any_no_more"] < 0.06
    assert free["no_more"] == sorted(free["no_more"], reverse=True) and free["no_more"][0] > 0.3


def test_the_audit_finds_the_same_and_sees_what_was_changed(results):
    gains = {
        "synchronous": 0,
        "refilled-1": -0.01,
        "refilled-2": 0.004,
        "refilled-4": -0.02,
        "uncorrected-4": -0.3,
    }
    results(refilled_tables.NAME, runs_of(gains, seconds=3.2))
    text = page()
    where, count = differing(text)
    assert where == [] and count == 5 * 13 + len(refilled_tables.NUMBERS)
    said = refilled_tables.NUMBERS["refilled-without-ratio"]()
    changed = text.replace(said, said.replace("-", "+", 1)).replace("| 1.00 | 0.850 |", "| 1.00 | 0.851 |", 1)
    assert differing(changed)[0] == [
        "refilled-learned: 1, effective sample size", "refilled-without-ratio",
    ]  # fmt: skip
