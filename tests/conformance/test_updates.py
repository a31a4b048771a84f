"""Every option of the update: four optimizer steps on the same samples give the same weights as TRL's."""

import re

import pytest

from tests.conformance.harness import SAME, Bench, Run, sum_reward

pytestmark = pytest.mark.slow

# An option that changes weights less than this has not been tested.
FELT = 2e-3

TWICE = {"num_iterations": 2}  # old log-probabilities are given and the ratio to them is not 1
SEVERAL = {"steps_per_generation": 2}

# What is logged otherwise than in TRL, and why.
DIFFERS = {
    "step_time|train_.*": "wall time",
    "entropy": "estimated over all samples by the engine's entropies, which are made up here",
    "sampling/.*": "TRL's, of rollouts; ours are those of the update that applies the ratio",
    "vespo/phi_seq_mean": "over all samples in TRL; without advantage it multiplies zero",
}

CASES = {
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1} | TWICE,
    "sapo": {"loss_type": "sapo"} | TWICE,
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"} | TWICE,
    "sapo, temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}
    | TWICE,
    "vespo": {"loss_type": "vespo"},
    "vespo, its curve": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.5,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.5,
        "vespo_lambda_neg": 1.0,
    },
    "beta": {"beta": 0.5},
    "beta, KL as it is": {"beta": 0.5, "use_bias_correction_kl": False} | TWICE,
    "beta, KL times the ratio": {"beta": 0.5, "use_bias_correction_kl": True} | TWICE,
    "iterations": TWICE,
    "steps_per_generation 2": SEVERAL,
    "steps_per_generation 4": {"steps_per_generation": 4, "per_device_train_batch_size": 4},
    "generation_batch_size": {"generation_batch_size": 16},
    "epsilon": {"epsilon": 0.01} | TWICE,
    "epsilon_high": {"epsilon_high": 0.5} | TWICE,
    "delta": {"delta": 1.05, "epsilon": 0.01, "learning_rate": 5e-2} | TWICE,
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation of a part": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "temperature": {"temperature": 0.7},
    "sequence level": {"importance_sampling_level": "sequence"} | TWICE,
    "scale_rewards batch": {"scale_rewards": "batch"},
    "scale_rewards none": {"scale_rewards": "none"},
    # Not 0.2 or 0.4, whose threshold falls among a group's first tokens: but for rounding, one entropy.
    "entropy quantile": {"top_entropy_quantile": 0.3},
    "entropy bonus": {"entropy_coef": 0.3},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.2},
    "adaptive entropy, its bounds": {
        "use_adaptive_entropy": True,
        "entropy_target": 9.0,
        "entropy_coef_delta": 0.2,
        "entropy_coef_min": 0.1,
        "entropy_coef_max": 0.25,
        "entropy_coef": 0.15,
    },
    "shorter completions": {"max_completion_length": 4},
    "off-policy mask": {"off_policy_mask_threshold": 0.4} | TWICE,
    "max_grad_norm": {"max_grad_norm": 1e-3, "optim": "sgd"},
    "weight decay and schedule": {"weight_decay": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "correction off": {"vllm_importance_sampling_correction": False},
    "correction at its upper bound": {"vllm_importance_sampling_clip_max": 1.2},
    "correction between bounds": {"vllm_importance_sampling_clip_min": 0.7},
    "token_mask": {"vllm_importance_sampling_mode": "token_mask"},
    "sequence_mask": {"vllm_importance_sampling_mode": "sequence_mask"},
    "sequence_truncate": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "token_mask, twice": {"vllm_importance_sampling_mode": "token_mask"} | TWICE,
    "sequence_truncate, several": {"vllm_importance_sampling_mode": "sequence_truncate"} | SEVERAL,
}

# Options that leave the weights as they are: both trainers end where they do without them.
INERT = {
    "none": {},
    "padding": {"pad_to_multiple_of": 16},
    "cast_lm_head_to_fp32": {"cast_lm_head_to_fp32": True},
    "disable_dropout": {"disable_dropout": True},
    "recomputation": {"gradient_checkpointing": True},
    "reentrant recomputation": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "reward weight": {"reward_weights": [1.0]},
}

# Where every weight trains, the embedding has rows that only rounding moves.
FULL = ["beta", "beta, KL times the ratio", "iterations", "steps_per_generation 2", "dapo", "temperature"]


MOVING = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7}


@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_in_trl(bench: Bench, name: str) -> None:
    trains_as_in_trl(bench, "lora", CASES[name], felt=True)


@pytest.mark.parametrize("name", FULL)
def test_all_weights_train_as_in_trl(bench: Bench, name: str) -> None:
    trains_as_in_trl(bench, "full", CASES[name], felt=True)


def test_a_reference_that_follows_the_policy_does_so_as_in_trl(bench: Bench) -> None:
    trains_as_in_trl(bench, "full", MOVING, felt=True)
    theirs = bench.run(False, "full", **MOVING)
    assert theirs.distance(bench.run(False, "full", beta=0.5)) > FELT


@pytest.mark.parametrize("name", INERT)
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_options_that_change_no_weight(bench: Bench, tuning: str, name: str) -> None:
    trains_as_in_trl(bench, tuning, INERT[name], felt=False)


def test_masked_samples_leave_the_mean_of_their_group(bench: Bench) -> None:
    """On purpose: TRL masks truncated samples and leaves their rewards in the mean; here they have none."""

    def only_whole(completion_ids, **kwargs):
        whole = [ids[-1] == bench.tokenizer.eos_token_id for ids in completion_ids]
        return [r if w else None for r, w in zip(sum_reward(completion_ids), whole, strict=True)]

    masked = {"mask_truncated_completions": True}
    theirs = bench.run(False, rewards=[only_whole], **masked)
    assert theirs.distance(bench.run(True, **masked)) < SAME
    assert theirs.distance(bench.run(False, **masked)) > FELT


def trains_as_in_trl(bench: Bench, tuning: str, options: dict, felt: bool) -> None:
    theirs = bench.run(False, tuning, **options) if options else bench.default(tuning)
    ours = bench.run(True, tuning, **options)
    assert theirs.start.keys() == ours.start.keys()
    assert all(theirs.start[name].equal(ours.start[name]) for name in theirs.start)
    assert theirs.script.asked == ours.script.asked
    assert theirs.distance(ours) < SAME
    effect = theirs.distance(bench.default(tuning))
    assert effect > FELT if felt else effect < SAME
    logs_as_in_trl(theirs, ours)


def logs_as_in_trl(theirs: Run, ours: Run) -> None:
    for row, other in zip(theirs.rows, ours.rows, strict=True):
        for name, value in row.items():
            if not any(re.fullmatch(pattern, name) for pattern in DIFFERS):
                assert other.get(name) == pytest.approx(value, rel=1e-3, abs=2e-5, nan_ok=True), name
