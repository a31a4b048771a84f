"""Every field of the settings: its type, its range, and what becomes of the parents' fields."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.settings import config
from qerl.settings.config import FIELDS, QeRLConfig
from qerl.settings.groups import DECLARED
from qerl.settings.parents import REFUSED, REPLACED, default_of
from qerl.settings.recipe import resolved

NAN, INF = float("nan"), float("inf")


def made(**fields) -> QeRLConfig:
    return QeRLConfig(**({"output_dir": "o", "report_to": "none"} | fields))


def test_each_field_of_the_parents_acts_or_is_replaced_or_refused():
    """Fails when TRL or transformers adds a field, until somebody has decided what becomes of it."""
    assert {
        spec.name for spec in dataclasses.fields(GRPOConfig)
    } <= DECLARED.keys() | REPLACED.keys() | REFUSED.keys()
    assert not REPLACED.keys() & (DECLARED.keys() | REFUSED.keys())
    assert DECLARED.keys() & REFUSED.keys() == {"bf16", "ddp_broadcast_buffers", "ddp_find_unused_parameters"}


def test_every_default_is_valid():
    made()


@pytest.mark.parametrize("change", [{}, {"max_steps": 1}, {"accelerator_config": {"non_blocking": True}}])
def test_settings_can_be_copied_with_changes(change):
    given = made(steps_per_generation=2, gradient_checkpointing=False)
    copy = dataclasses.replace(given, **change)
    assert resolved(copy) == resolved(given) | change


def test_a_field_that_a_newer_parent_adds_is_refused(monkeypatch):
    others = {name: instead for name, instead in REFUSED.items() if name != "fp16"}
    monkeypatch.setattr(config, "REFUSED", others)
    made()
    with pytest.raises(QeRLError, match=r"^fp16 is a field .* that this version .* \(false\); remove it\.$"):
        made(fp16=True)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & FIELDS.keys()))
def test_a_field_without_effect_must_keep_its_default(name):
    default = default_of(FIELDS[name])
    other = not default if isinstance(default, bool) else "set"
    with pytest.raises(QeRLError, match=rf"^{name} has no effect in QeRL .+ \(.+\); remove it.*\.$"):
        made(**{name: other})


@pytest.mark.parametrize(("name", "value"), [("data_seed", 0), ("activation_checkpointing", False)])
def test_a_value_that_is_false_says_something_where_the_default_is_unset(name, value):
    if name not in FIELDS:
        pytest.skip(f"this version of transformers has no {name}")
    with pytest.raises(QeRLError, match=f"^{name} has no effect in QeRL"):
        made(**{name: value})


TAUGHT = {"algorithm": "distill", "teacher": "base"}
FULL = {"tuning": "full", "weights": "bf16"}

WRONG = {
    "max_steps": ["ten", 1.5, True, 0, -2, None, 10**20],
    "lora_r": [8.5, True, 0, -1, "8", None, [8]],
    "lora_alpha": [0, 1.5],
    "lora_dropout": ["x", -0.1, 1, NAN],
    "lora_target_modules": [[], [1], 3, {"q_proj": 1}, [""]],
    "learning_rate": ["fast", -1, NAN, INF, True],
    "temperature": ["hot", 0, -1, NAN, INF, True, None],
    "top_k": [None, -1, 1.5],
    "top_p": [0, 1.1, NAN],
    "min_p": [-0.1, 2],
    "per_device_train_batch_size": [0, -1, 1.5],
    "gradient_accumulation_steps": [0, "x"],
    "num_generations": [0, 1, None, 2.0],
    "steps_per_generation": [0, 1.5],
    "max_completion_length": [0, -5, "x", None],
    "max_prompt_length": ["x", 0],
    "noise": ["maybe", 1, None],
    "noise_sigma_start": ["abc", 0, -1, NAN],
    "noise_stages": [2.5, 1],
    "noise_schedule": ["step", None],
    "noise_scale": ["log", None],
    "curriculum_floor": [0, 1.5, NAN, "low"],
    "pass_at_k": [1, 0, 2.5],
    "loss_type": ["foo", 3],
    "report_to": ["nowhere", 3, None, ["nowhere"]],
    "optim": ["foo", None],
    "lr_scheduler_type": ["foo", 3],
    "lr_scheduler_kwargs": ["x", [1]],
    "save_strategy": [False, "maybe"],
    "eval_strategy": [False, "yes"],
    "logging_steps": [0, -1, 2.5],
    "save_steps": [0, 1.5],
    "warmup_steps": [-1, 1.5, NAN],
    "task_options": [3, [1], None, "level"],
    "reward_files": [[1], 3, None],
    "reward_timeout": [-1, 0, "x", INF],
    "seed": ["x", -1, 2**32, 1.5],
    "beta": ["x", -1, NAN],
    "epsilon": [-0.1, NAN],
    "model": [[1], 7, "", "a\nb"],
    "task": [7, ""],
    "output_dir": ["", 3, "a\0b", "\udc80"],
    "eval_samples": [0],
    "overlong_buffer": [1, -0.1],
    "dynamic_sampling_batches": [-1, 1.5],
    "tokens_per_forward": [0],
    "scale_rewards": ["groups", 3],
    "reward_weights": [[], ["a"], 1.0, [NAN]],
    "gradient_checkpointing_kwargs": [{"every_n_layers": 0}, {"every": 2}, {"offload": 1}, 3],
    "log_level": ["loud"],
    "top_entropy_quantile": [1.5],
    "save_total_limit": [0],
    "importance_sampling_level": ["tokens"],
    "vllm_importance_sampling_mode": ["sequence", None],
    "gradient_checkpointing": ["x", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, many in WRONG.items() for value in many])
def test_a_wrong_value_is_named_in_one_sentence(name, value):
    with pytest.raises(QeRLError, match=rf"^{name}(\[\w+\])? is .+; (it|there) .+\.$"):
        made(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("reward_files", "a.py:f", ["a.py:f"]),
        ("lora_target_modules", "q_proj", ["q_proj"]),
        ("learning_rate", 1, 1.0),
        ("lr_scheduler_type", SchedulerType.COSINE, SchedulerType.COSINE),
        ("lr_scheduler_type", "cosine", SchedulerType.COSINE),
        ("report_to", ["tensorboard"], ["tensorboard"]),
        ("report_to", [], []),
        ("scale_rewards", False, "none"),
        ("scale_rewards", True, "group"),
        ("max_steps", -1, -1),
        ("warmup_steps", 0.1, 0.1),
        ("logging_steps", 5, 5),
        ("resume_from_checkpoint", True, True),
        ("resume_from_checkpoint", "runs/a/checkpoint-3", "runs/a/checkpoint-3"),
        ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": False}),
        ("output_dir", Path("runs/a"), "runs/a"),
        ("seed", np.int64(3), 3),
        ("noise", np.bool_(True), True),
        ("learning_rate", np.float32(0.5), 0.5),
        ("save_steps", 500.0, 500),
        ("logging_steps", 1.0, 1),
        ("warmup_steps", 10.0, 10),
        ("reward_weights", (1, 0.5), [1.0, 0.5]),
        ("debug", "", []),
        ("bf16", None, False),
        ("ddp_broadcast_buffers", None, False),
        ("ddp_find_unused_parameters", None, False),
    ],
)
def test_what_is_accepted(name, value, held):
    config = made(**{name: value})
    assert getattr(config, name) == held
    assert type(getattr(config, name)) is type(held)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"noise": True, "noise_stages": 10, "max_steps": 9}, "10 stages but the run only 9 steps"),
        ({"noise_scale": "relative"}, "noise_scale needs noise; set"),
        ({"curriculum_floor": 0.2}, "needs a curriculum; set curriculum: true, or remove it"),
        ({"pass_at_k": 8, "num_generations": 8, "scale_rewards": "none"}, "set it below that"),
        ({"pass_at_k": 4, "multi_objective_aggregation": "normalize_then_sum"}, "the best of summed rewards"),
        ({"pass_at_k": 4}, r"; set scale_rewards: none \(or batch\)\.$"),
        ({"pass_at_k": 4, "scale_rewards": True}, "set scale_rewards: none"),
        (
            {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
            "vespo needs ratios per token",
        ),
        ({"use_adaptive_entropy": True, "entropy_coef_min": 2.0}, "entropy_coef_min is 2.0"),
        ({"dataloader_persistent_workers": True}, "set dataloader_num_workers"),
        ({"generation_batch_size": 16, "steps_per_generation": 1}, "is 16, .* = 1 makes it 8; remove"),
        ({"loss_type": "cispo"}, "the largest ratio itself, and 0.2 is below"),
        ({"loss_type": "cispo", "algorithm": "dapo"}, "and 0.2 is below"),
        (
            {"loss_type": "dppo_tv", "importance_sampling_level": "sequence"},
            "dppo_tv masks tokens by their own",
        ),
        ({"algorithm": "gspo", "loss_type": "dppo_kl"}, "set importance_sampling_level: token"),
        ({"rollout_rs": "seq_mean_k3"}, "rollout_rs and rollout_rs_threshold need each other"),
        ({"rollout_rs_threshold": 0.1}, "need each other"),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.0}, "and 1.0 is not above 1"),
        ({"filter_zero_advantages": True, "loss_type": "bnpo"}, "bnpo divides by the tokens of a microbatch"),
        ({"filter_zero_advantages": True, "beta": 0.1}, "but beta gives their tokens a loss"),
        (TAUGHT | {"filter_zero_advantages": True}, "but a teacher gives their tokens a loss"),
        ({"scale_rewards": "mean", "overlong_buffer": 0.2}, "needs rewards that are not negative"),
        ({"scale_rewards": "mean", "algorithm": "dapo"}, "needs rewards that are not negative"),
        *(
            ({"delta": 2.0, "loss_type": name, "epsilon_high": 5.0}, f"{name} has no clip that delta bounds")
            for name in ("cispo", "sapo", "vespo", "kl_cov")
        ),
        ({"clip_cov_ratio": 0.5}, "clip_cov_ratio acts with loss_type: clip_cov"),
        ({"clip_cov_ub": 6.0, "loss_type": "kl_cov"}, "clip_cov_ub acts with loss_type: clip_cov"),
        ({"kl_cov_ratio": 0.5, "loss_type": "clip_cov"}, "kl_cov_ratio acts with loss_type: kl_cov"),
        ({"ppo_kl_coef": 3.0}, "ppo_kl_coef acts with loss_type: kl_cov"),
        *(
            (
                {"use_rollout_logprobs": True, f"vllm_importance_sampling_clip_{end}": 0.5},
                "truncates the importance-sampling factor",
            )
            for end in ("min", "max")
        ),
        *(
            (TAUGHT | fields, "acts on rewards, which have no weight in the loss")
            for fields in (
                {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
                {"pass_at_k": 2, "scale_rewards": "none"},
                {"loss_type": "kl_cov"},
                {"loss_type": "dppo_tv"},
            )
        ),
        (
            {"scale_rewards": "mean", "multi_objective_aggregation": "normalize_then_sum"},
            "divides by the mean of summed rewards",
        ),
        ({"pass_at_k": 4, "scale_rewards": "mean"}, "scale_rewards: mean would divide out again"),
        ({"clip_cov_lb": 5.0}, "set the first below the second"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"per_device_train_batch_size": 8, "generation_batch_size": 12}, "contradict each other"),
        (
            {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "num_generations": 4},
            r"num_generations is 4, and the 18 .* \(per_device_train_batch_size 6 x "
            r"gradient_accumulation_steps 3\) are not a multiple of it; set it to 3, or change the batch\.$",
        ),
        ({"per_device_train_batch_size": 1}, r"are not a multiple of it; change the batch\.$"),
        ({"steps_per_generation": 3, "num_generations": 7}, "8 x steps_per_generation 3.*; set it to 6, or"),
        ({"eval_on_start": True, "per_device_eval_batch_size": 3}, "3, which is not a multiple of"),
        ({"sync_ref_model": True, "beta": 0.1}, "sync_ref_model needs tuning: full"),
        ({"sync_ref_model": True, **FULL}, "sync_ref_model has no reference to move"),
        ({"backward_dtype": "fp8", "weights": "nf4"}, "weights in nvfp4 or mxfp4, and these are nf4"),
        ({"backward_dtype": "fp8", **FULL}, "and these are bf16; set backward_dtype"),
    ],
)
def test_fields_that_contradict_each_other(fields, message):
    with pytest.raises(QeRLError, match=message):
        made(**fields)


@pytest.mark.parametrize("scale", ["none", "batch", False])
def test_pass_at_k_goes_with_any_scale_but_the_groups(scale):
    assert made(pass_at_k=4, scale_rewards=scale).pass_at_k == 4


def test_epsilon_alone_clips_as_in_trl():
    assert made(epsilon=0.1).epsilon_high == 0.1
    assert made(epsilon=0.1, epsilon_high=0.3).epsilon_high == 0.3
    assert made(epsilon_high=made(epsilon=0).epsilon_high).epsilon_high == 0  # what is written is read again
    assert made(epsilon=0.1, algorithm="dapo").epsilon_high == 0.28


def test_several_visible_gpus_do_not_become_data_parallel(monkeypatch):
    found = TrainingArguments._setup_devices.func

    def two(config):
        device = found(config)
        config._n_gpu = 2
        return device

    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(two))
    assert made().n_gpu == 1
