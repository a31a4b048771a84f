"""What contradicts what in the settings, found when they are made and before anything is loaded.

Each function takes a `qerl.settings.config.QeRLConfig`, named by its parent here so that no module imports
the other in a circle.
"""

import dataclasses
import os

from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.weight_formats import FORMATS

_OFF = {
    "bf16": "is not supported: set dtype instead, which trainer and sampler share",
    "ddp_broadcast_buffers": "would send the packed weights before every forward pass; remove it",
    "ddp_find_unused_parameters": "would look for adapters without a gradient, and there are none; remove it",
}
"""Why each of these fields of the parents stays off."""

_OF_VESPO = ("token_truncate", "token_mask")
"""Modes of the importance correction that TRL's VESPO loss accepts."""


def check(config: GRPOConfig) -> None:
    """Refuse fields that contradict each other, as they were given: the algorithm's are not filled in yet.

    Raises:
        QeRLError: Two fields contradict each other.
    """
    if config.tuning == "full" and not FORMATS[config.weights].trains_in_full:
        raise QeRLError(
            f"tuning: full cannot train packed {config.weights} weights; set weights: bf16 or tuning: lora."
        )
    _keep_off(config)
    _check_reference(config)
    _check_noise(config)
    _check_loss(config)
    _check_curriculum(config)
    _check_thinking(config)
    _check_workers(config)


def check_evaluation(config: GRPOConfig) -> None:
    """Refuse what goes by evaluations that do not come, and groups that these would spread over processes, as
    they could not be scored there.

    Raises:
        QeRLError: There are no evaluations to stop by, or the evaluation's batch does not hold whole groups.
    """
    if config.early_stopping_patience is not None and config.eval_strategy == "no":
        raise QeRLError(
            "early_stopping_patience goes by evaluations, and there are none; set eval_strategy: steps and "
            "eval_steps, or remove it."
        )
    if config.early_stopping_threshold and config.early_stopping_patience is None:
        raise QeRLError(
            "early_stopping_threshold acts with early_stopping_patience; set that too, or remove it."
        )
    groups = config.num_generations_eval or config.num_generations or 1
    if config.evaluates and config.per_device_eval_batch_size % groups:
        raise QeRLError(
            f"per_device_eval_batch_size is {config.per_device_eval_batch_size}, which groups of {groups} "
            "(num_generations_eval, else num_generations) do not divide; change one of them."
        )


def check_ratios(config: GRPOConfig) -> None:
    """Refuse a bound of the ratio that means something else in this loss; the algorithm's are filled in.

    Raises:
        QeRLError: It is no bound of CISPO's.
    """
    if config.loss_type == "cispo" and config.epsilon_high < 1:
        raise QeRLError(
            f"loss_type cispo takes epsilon_high as the largest ratio itself, and {config.epsilon_high} is "
            "below nearly every ratio; set it to 1 or more, 5.0 as in TRL's documentation."
        )


def take_rollout_size(config: GRPOConfig) -> int | None:
    """`generation_batch_size` as it was given; unset where `steps_per_generation` says the same, because TRL
    takes one of the two and computes the other."""
    said: int | None = config.generation_batch_size
    if config.steps_per_generation is not None:
        config.generation_batch_size = None
    return said


def check_rollout_size(config: GRPOConfig, said: int | None) -> None:
    """Refuse two fields that say how much a rollout samples, and say different things.

    Args:
        config: Settings, with the number that follows from `steps_per_generation`.
        said: `generation_batch_size` as it was given.

    Raises:
        QeRLError: They differ.
    """
    if said is not None and said != config.generation_batch_size:
        raise QeRLError(
            f"generation_batch_size is {said}, and steps_per_generation = {config.steps_per_generation} "
            f"makes it {config.generation_batch_size}; remove one of the two."
        )


def check_groups(config: GRPOConfig) -> None:
    """Refuse groups that rollouts would spread over processes: each computes a group's prompt once.

    Raises:
        QeRLError: What a process samples does not divide into groups.
    """
    local = config.per_device_train_batch_size * (config.steps_per_generation or 1)
    if local % (config.num_generations or 1):
        raise QeRLError(
            f"A process samples {local} completions at a time (per_device_train_batch_size x "
            f"steps_per_generation), which num_generations = {config.num_generations} does not divide; "
            "change one of them."
        )


def check_processes(config: GRPOConfig) -> None:
    """Refuse several processes without a GPU that nobody told to share the CPU: each would train alone.

    Raises:
        QeRLError: A launcher started more processes than work together.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if started > 1 and config.world_size == 1:
        raise QeRLError(
            f"{started} processes were started where there is no GPU, and each would train by itself; set "
            "use_cpu: true, which lets them train together on the CPU."
        )


def _keep_off(config: GRPOConfig) -> None:
    """Turn off what transformers and torch would turn on where nobody sets it."""
    for name, reason in _OFF.items():
        if getattr(config, name):
            raise QeRLError(f"{name} {reason}.")
        setattr(config, name, False)


def _check_reference(config: GRPOConfig) -> None:
    if config.sync_ref_model and config.beta == 0.0:
        raise QeRLError(
            "sync_ref_model has no reference to move: beta is 0; set beta, or remove sync_ref_model."
        )
    if config.sync_ref_model and config.tuning != "full":
        raise QeRLError(
            "sync_ref_model needs tuning: full; with LoRA the reference is the base model, which never "
            "moves. Remove sync_ref_model, or train all weights."
        )


def _check_noise(config: GRPOConfig) -> None:
    """The length of a run in epochs is known with its data; `qerl.trainer.preflight` checks its stages.

    The schedule may stand beside `noise: false`, so that one flag turns a tuned schedule off and on; that a
    recipe forgot `noise` is found where it is known what was given, in `qerl.settings.recipe`.
    """
    if config.noise:
        config.noise_schedule_of(config.max_steps if config.max_steps > 0 else config.noise_stages)
    elif config.noise_scale != "absolute":
        raise QeRLError("noise_scale needs noise; set noise: true, or remove it.")


def _check_loss(config: GRPOConfig) -> None:
    if config.loss_type == "vespo" and config.vllm_importance_sampling_mode not in _OF_VESPO:
        raise QeRLError(
            "loss_type vespo needs ratios per token; set "
            f"vllm_importance_sampling_mode to {' or '.join(_OF_VESPO)}."
        )
    if config.pass_at_k is not None and config.pass_at_k >= config.num_generations:
        raise QeRLError(
            f"pass_at_k is {config.pass_at_k}, and a group has {config.num_generations} samples "
            "(num_generations), of which any set of k would hold nearly all; make it smaller."
        )
    if config.pass_at_k is not None and config.multi_objective_aggregation != "sum_then_normalize":
        raise QeRLError(
            "pass_at_k takes the best of summed rewards; set multi_objective_aggregation: sum_then_normalize."
        )
    if config.pass_at_k is not None and config.scale_rewards in ("group", True):
        raise QeRLError(
            "pass_at_k changes how far apart right and wrong samples of a group are, and scale_rewards: "
            "group divides that out again; set scale_rewards: none (or batch)."
        )
    if config.mask_truncated_completions and config.overlong_buffer:
        raise QeRLError(
            "mask_truncated_completions leaves out the samples that overlong_buffer punishes; set one of "
            "the two."
        )
    if config.entropy_coef_min > config.entropy_coef_max:
        raise QeRLError(
            f"entropy_coef_min is {config.entropy_coef_min} and entropy_coef_max {config.entropy_coef_max}; "
            "swap them."
        )


def _check_curriculum(config: GRPOConfig) -> None:
    default = {field.name: field.default for field in dataclasses.fields(config)}["curriculum_floor"]
    if config.curriculum_floor != default and not config.curriculum:
        raise QeRLError("curriculum_floor needs a curriculum; set curriculum: true, or remove it.")


def _check_thinking(config: GRPOConfig) -> None:
    budget, most = config.thinking_budget, config.max_completion_length
    if budget is not None and budget >= most:
        raise QeRLError(
            f"thinking_budget is {budget}, and a completion ends at {most} tokens (max_completion_length); "
            "make it smaller, so that there is room for an answer."
        )
    if budget is not None and config.early_rewards:
        raise QeRLError(
            "early_rewards calls reward functions for completions of one turn, and thinking_budget makes "
            "several of one; set one of the two."
        )
    default = {field.name: field.default for field in dataclasses.fields(config)}["thinking_end"]
    if budget is None and config.thinking_end != default:
        raise QeRLError("thinking_end needs a thinking_budget; set it, or remove thinking_end.")


def _check_workers(config: GRPOConfig) -> None:
    workers = config.dataloader_persistent_workers or config.dataloader_multiprocessing_context is not None
    if workers and not config.dataloader_num_workers:
        raise QeRLError(
            "dataloader_persistent_workers and dataloader_multiprocessing_context need workers; set "
            "dataloader_num_workers."
        )
