"""A study's YAML: what it becomes, and what a mistake in it is called."""

import copy

import pytest

from lab.study.arms import Arm, Run
from lab.study.spec import make_study, read_study
from qerl.errors import QeRLError

VALUES = {
    "model": "m",
    "task": "arithmetic",
    "steps": 10,
    "learning_rates": [1e-4, 2e-4],
    "tuning_seeds": 2,
    "test_seeds": 3,
    "all_arms": {"lora_r": 4},
    "arms": {"none": None, "aqn": {"noise": True, "noise_scale": "relative"}},
    "comparisons": {"primary": [["aqn", "none"]]},
}


def changed(**fields):
    return copy.deepcopy(VALUES) | fields


def test_arms_seeds_and_runs():
    study = read_study("x.yaml", VALUES)
    none, aqn = study.arms.values()
    assert none == Arm("none", lora_r=4)
    assert aqn == Arm("aqn", lora_r=4, noise=True, noise_scale="relative")
    assert study.tuning_seeds == [1000, 1001] and study.test_seeds == [0, 1, 2]
    assert study.tuning_runs(aqn) == [
        Run(aqn, 1000, 1e-4), Run(aqn, 1001, 1e-4), Run(aqn, 1000, 2e-4), Run(aqn, 1001, 2e-4),
    ]  # fmt: skip
    assert study.test_runs(aqn, 2e-4) == [Run(aqn, 0, 2e-4), Run(aqn, 1, 2e-4), Run(aqn, 2, 2e-4)]
    assert study.eval_at == [0, 4, 8, 10]


def test_values_make_the_same_study():
    study = make_study(VALUES)
    assert make_study(study.values()) == study
    assert study.values()["arms"]["aqn"]["noise_sigma_start"] == 1e-2  # defaults are written out


def test_noise_on_logits_is_driven_to_a_kl_too():
    arms = {"a": {"logits_noise": 0.5, "noise_target_kl": 0.03, "noise_stages": 3}}
    assert read_study("x", changed(arms=arms, comparisons={})).arms["a"].noise_target_kl == 0.03


def test_a_sweep_runs_every_seed_at_every_rate():
    study = make_study(changed(tuning_seeds=0, comparisons={}))
    assert not study.tunes and study.tuning_runs(study.arms["none"]) == []
    assert len(study.test_runs(study.arms["none"], None)) == 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stepz": 3}, "the key 'stepz' is unknown (did you mean 'steps'?)."),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"model": None}, "model is not set"),
        ({"arms": {}}, "at least one arm"),
        ({"arms": {"a/b": {}}}, "'a/b' must be letters"),
        ({"arms": {"a": {"noize": True}}}, "arms.a has the unknown field 'noize' (did you mean 'noise'?)."),
        ({"arms": {"a": {"lora_r": 0}}}, "arms.a.lora_r is 0; it must be at least 1."),
        ({"arms": {"a": {"weights": "int3"}}}, "arms.a.weights is 'int3'"),
        ({"arms": {"a": {"noise_share": 0.5}}, "comparisons": {}}, "does nothing without `noise: true`"),
        ({"arms": {"a": {"noise": True}}, "steps": 4}, "arms.a: The noise schedule has 5 stages"),
        ({"arms": {"a": {"match_entropy": "b"}}}, "names the arm 'b', which does not exist"),
        (
            {"arms": {"a": {"match_entropy": "bb"}, "bb": {"match_entropy": "a"}}},
            "which itself has match_entropy",
        ),
        (
            {"arms": {"a": {"match_entropy": "b"}, "b": None}, "comparisons": {}},
            "names b, which has no noise that begins after",
        ),
        (
            {"arms": {"a": {"match_entropy": "b", "learning_rate": 1e-3}, "b": {"noise": True}}},
            "their learning rates differ; set the same for both",
        ),
        (
            {"arms": {"a": {"match_entropy": "b", "temperature_stages": [1.1]}, "b": {"noise": True}}},
            "which controls the temperature, and temperature_stages; choose one",
        ),
        (
            {"arms": {"a": {"temperature_stages": [1.0] * 9}}, "steps": 8},
            "9 stages, more than the 8 steps of a run",
        ),
        ({"arms": {"a": {"temperature_stages": []}}}, "it must not be empty"),
        (
            {"arms": {"a": {"noise": True, "noise_sigma_stages": [0.0] * 9}}, "steps": 8},
            "noise_sigma_stages has 9 stages, more than the 8 steps of a run",
        ),
        (
            {"arms": {"a": {"noise": True, "noise_sigma_stages": [0, 0.1], "noise_target_kl": 0.1}}},
            "which fixes sigma, and noise_target_kl, which drives it; choose one",
        ),
        (
            {"arms": {"a": {"noise_sigma_stages": [0.1]}}, "comparisons": {}},
            "does nothing without `noise: true`",
        ),
        (
            {"arms": {"a": {"use_rollout_logprobs": True}}},
            "whose ratio corrects for the sampler; set `correction: none`.",
        ),
        (
            {"arms": {"a": {"loss_type": "dppo_tv"}}},
            "has loss_type dppo_tv, which bounds nothing without `use_rollout_logprobs: true`.",
        ),
        ({"arms": {"a": {"delta": 20.0}}}, "has delta, which does nothing without `use_rollout"),
        ({"arms": {"a": {"pass_at_k": 9}}}, "the arm a has pass_at_k 9, more than the 8 samples_per_prompt."),
        ({"arms": {"a": {"noise": True, "logits_noise": 1.0}}}, "in norms and in logits"),
        ({"arms": {"a": {"noise": True, "noise_share": 0.01}}}, "is 0 of 8 samples; raise it"),
        ({"arms": {"a": {"correction": "token_balance"}}}, "a noise_share below 1"),
        (
            {"arms": {"a": None}, "all_arms": {"noise_target_kl": 0.1}},
            "needs `noise: true` or a logits_noise",
        ),
        (
            {"arms": {"a": {"logits_noise": 1.0, "noise_share": 0.5}}, "comparisons": {}},
            "does nothing without `noise: true`",
        ),
        ({"comparisons": {"primary": [["aqm", "none"]]}}, "the arm 'aqm', which does not exist (did you"),
        ({"comparisons": {"primary": [["none", "none"]]}}, "none with itself"),
        ({"comparisons": {"primary": [["aqn", "none"]] * 2}}, "twice"),
        ({"comparisons": {"primary": [["aqn"]]}}, "comparisons[primary] is ['aqn']"),
        ({"tuning_seeds": [1], "test_seeds": [1, 2]}, "1 is both a tuning seed and a test seed"),
        ({"test_seeds": [1, 1]}, "test_seeds lists a value twice"),
        ({"test_seeds": True}, "test_seeds is True"),
        ({"tuning_seeds": 0}, "need tuning_seeds"),
        ({"eval_steps": 11}, "more than the 10 steps"),
    ],
)
def test_mistakes(fields, words):
    with pytest.raises(QeRLError) as error:
        read_study("x.yaml", changed(**fields))
    assert str(error.value).startswith("In the study x.yaml: ")
    assert words in str(error.value)
