"""What becomes of every field of TRL's `GRPOConfig` and transformers' `TrainingArguments`.

A field acts, or it is refused with the reason when it is set. One that asks for speed or memory and for no
other result is accepted, and each run says once what takes its place. Three fields are for scripts around a
trainer and are left alone, as `Trainer` itself leaves them. Where a parent's annotation says less than what
is accepted (`str` where six words are valid, `int` where 0 is not), the type stands here. A test compares
this table with the classes: a field that a new TRL adds fails it until somebody has decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, trainer_log_levels
from typing_extensions import TypedDict  # pydantic needs its backport before Python 3.12

from qerl.settings.checks import (
    MOST,
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    PositiveShare,
    Seed,
    Share,
    ShareBelow1,
    ShareOrSteps,
    Steps,
    Text,
)


@dataclass(frozen=True)
class Acts:
    """A field that does what its parent's documentation says; ``type`` is what it accepts."""

    type: Any


@dataclass(frozen=True)
class Refused:
    """A field that must keep its default; ``reason`` completes "NAME is not supported: ..."."""

    reason: str


@dataclass(frozen=True)
class Replaced:
    """A field that asks how fast or in how much memory something is done, which is done otherwise here.

    Attributes:
        type: What it accepts; its value is not kept.
        by: What takes its place, as a whole clause.
    """

    type: Any
    by: str


@dataclass(frozen=True)
class ForScripts:
    """A field that no trainer reads; ``type`` is what it accepts."""

    type: Any


class Dispatch(TypedDict, total=False):
    """Options of accelerate that leave batches as they are: which process reads a stream, and how batches get
    to the device."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    dispatch_batches: bool
    non_blocking: bool


class Checkpointing(TypedDict, total=False):
    """Options of gradient checkpointing: torch's, every how many layers are recomputed, and whether what is
    kept of those waits in the CPU's memory."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    every_n_layers: PositiveInt
    offload: bool
    use_reentrant: bool
    preserve_rng_state: bool
    determinism_check: Literal["default", "none"]
    debug: bool


def _one_of(values: Any) -> Any:
    return Literal[tuple(getattr(value, "value", value) for value in values)]


def _list_of(type_: Any) -> Any:
    return list[type_]


_REPORTERS: Any = _one_of(["none", "all", *INTEGRATION_TO_CALLBACK])
_ENGINE = "rollouts run on the built-in engine, on the weights that train"
_LAYERS = "the update has fused layers of its own"
_DIVIDED = "an update that runs out of memory divides itself"
_ONE_COPY = "the packed weights are one copy per GPU; data parallelism over torchrun is what there is"
_NO_LOGITS = "evaluation scores samples by their rewards and keeps no logits"
_AUTOCAST = "autocast would make the trainer's policy differ from the sampler's; set dtype"
_BATCHES = "a process must get whole groups, in an order that a resume can repeat"

_CACHES = Literal[
    "dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "offloaded_hybrid",
    "offloaded_hybrid_chunked", "hybrid", "hybrid_chunked", "sliding_window",
]  # fmt: skip
"""Kinds of transformers' cache that round nothing."""

PARENTS: dict[str, Acts | Replaced | Refused | ForScripts] = {
    # Length of the run, batches, optimizer
    "output_dir": Acts(Text | None),
    "per_device_train_batch_size": Acts(PositiveInt),
    "num_train_epochs": Acts(Positive),
    "max_steps": Acts(Literal[-1] | PositiveInt),
    "gradient_accumulation_steps": Acts(PositiveInt),
    "lr_scheduler_type": Acts(_one_of(SchedulerType)),
    "lr_scheduler_kwargs": Acts(dict[str, Any] | None),
    "warmup_steps": Acts(ShareBelow1 | Steps),
    "optim": Acts(_one_of(OptimizerNames)),
    "optim_args": Acts(Text | None),
    "optim_target_modules": Refused("the optimizers that take it need dense weights of their own layers"),
    "weight_decay": Acts(NonNegative),
    "adam_beta1": Acts(ShareBelow1),
    "adam_beta2": Acts(ShareBelow1),
    "adam_epsilon": Acts(NonNegative),
    "max_grad_norm": Acts(NonNegative),
    "average_tokens_across_devices": Refused("the loss of GRPO has normalisers of its own; see loss_type"),
    "label_smoothing_factor": Refused("there are no labels"),
    "neftune_noise_alpha": Refused("it would make the trainer's policy differ from the sampler's"),
    "auto_find_batch_size": Replaced(bool, _DIVIDED),
    # Precision, memory, compilation
    "fp16": Refused(_AUTOCAST),
    "bf16_full_eval": Refused(_AUTOCAST),
    "fp16_full_eval": Refused(_AUTOCAST),
    "tf32": Acts(bool | None),
    "gradient_checkpointing": Acts(bool),
    "gradient_checkpointing_kwargs": Acts(Checkpointing | None),
    "torch_compile": Replaced(bool, _LAYERS),
    "torch_compile_backend": Replaced(Text | None, _LAYERS),
    "torch_compile_mode": Replaced(Text | None, _LAYERS),
    "use_liger_kernel": Replaced(bool, _LAYERS),
    "liger_kernel_config": Replaced(dict[str, Any] | None, _LAYERS),
    "use_cache": Replaced(bool, _ENGINE),
    "torch_empty_cache_steps": Acts(PositiveInt | None),
    "cast_lm_head_to_fp32": Acts(bool),
    "disable_dropout": Acts(bool),
    "skip_memory_metrics": Acts(bool),
    # Logging
    "logging_strategy": Acts(_one_of(IntervalStrategy)),
    "logging_first_step": Acts(bool),
    "log_on_each_node": Acts(bool),
    "include_num_input_tokens_seen": Refused("`num_tokens` in the log counts them"),
    "log_level": Acts(_one_of(trainer_log_levels)),
    "log_level_replica": Acts(_one_of(trainer_log_levels)),
    "disable_tqdm": Acts(bool | None),
    "report_to": Acts(_REPORTERS | _list_of(_REPORTERS)),
    "run_name": Acts(Text | None),
    "project": Acts(Text),
    "trackio_space_id": Acts(Text | None),
    "trackio_bucket_id": Acts(Text | None),
    "trackio_static_space_id": Acts(Text | Literal[False] | None),
    "log_completions": Acts(bool),
    "log_multimodal": Refused("only text models are supported"),
    "log_unique_prompts": Acts(bool),
    "log_completions_hub_repo": Acts(Text | None),
    # Evaluation
    "eval_strategy": Acts(_one_of(IntervalStrategy)),
    "eval_steps": Acts(ShareOrSteps | None),
    "eval_delay": Acts(NonNegative),
    "eval_on_start": Acts(bool),
    "num_generations_eval": Acts(PositiveInt | None),
    "prediction_loss_only": Refused(_NO_LOGITS),
    "eval_do_concat_batches": Refused(_NO_LOGITS),
    "eval_use_gather_object": Refused(_NO_LOGITS),
    "eval_accumulation_steps": Refused(_NO_LOGITS),
    "include_for_metrics": Refused(_NO_LOGITS),
    "batch_eval_metrics": Refused(_NO_LOGITS),
    "label_names": Refused("there are no labels"),
    # Checkpoints and the Hub
    "save_strategy": Acts(_one_of(SaveStrategy)),
    "save_steps": Acts(ShareOrSteps),
    "save_only_model": Acts(bool),
    "save_on_each_node": Acts(bool),
    "save_total_limit": Acts(PositiveInt | None),
    "enable_jit_checkpoint": Refused("Ctrl-C saves a checkpoint, and two handlers would contend for it"),
    "load_best_model_at_end": Acts(bool),
    "greater_is_better": Acts(bool | None),
    "ignore_data_skip": Acts(bool),
    "restore_callback_states_from_checkpoint": Acts(bool),
    "resume_from_checkpoint": Acts(bool | Text | None),
    "push_to_hub": Acts(bool),
    "hub_model_id": Acts(Text | None),
    "hub_strategy": Acts(_one_of(HubStrategy)),
    "hub_token": Refused("settings are written beside the run in plain text; set HF_TOKEN"),
    "hub_private_repo": Acts(bool | None),
    "hub_always_push": Acts(bool),
    "hub_revision": Acts(Text | None),
    # Data, seeds, devices
    "seed": Acts(Seed),
    "data_seed": Refused("the order of the data follows `seed`"),
    "full_determinism": Acts(bool),
    "shuffle_dataset": Acts(bool),
    "remove_unused_columns": Acts(bool | None),
    "dataloader_drop_last": Acts(bool),
    "dataloader_num_workers": Acts(Count),
    "dataloader_pin_memory": Acts(bool),
    "dataloader_persistent_workers": Acts(bool),
    "dataloader_prefetch_factor": Acts(PositiveInt | None),
    "dataloader_multiprocessing_context": Acts(Literal["fork", "spawn", "forkserver"] | None),
    "dataloader_in_order": Acts(bool),
    "train_sampling_strategy": Refused(_BATCHES),
    "length_column_name": Refused(_BATCHES),
    "accelerator_config": Acts(Dispatch | None),
    "use_cpu": Acts(bool),
    "local_rank": Refused("torchrun tells each process its rank"),
    "ddp_bucket_cap_mb": Acts(PositiveInt | None),
    "ddp_static_graph": Refused("steps differ in their number of backward passes"),
    "ddp_backend": Acts(Literal["nccl", "gloo", "mpi"] | None),
    "ddp_timeout": Acts(PositiveInt),
    "parallelism_config": Refused(_ONE_COPY),
    "fsdp": Refused(_ONE_COPY),
    "fsdp_config": Refused(_ONE_COPY),
    "deepspeed": Refused(_ONE_COPY),
    "ds3_gather_for_generation": Refused(_ONE_COPY),
    "debug": Refused("its hooks do not see the fused layers of the update"),
    "do_train": ForScripts(bool),
    "do_eval": ForScripts(bool),
    "do_predict": ForScripts(bool),
    # Model
    "model_init_kwargs": Acts(dict[str, Any] | None),
    "trust_remote_code": Acts(bool),
    "router_aux_loss_coef": Acts(NonNegative | None),
    # Sampling
    "num_generations": Acts(Annotated[int, Field(ge=2, le=MOST)]),
    "max_completion_length": Acts(PositiveInt),
    "generation_batch_size": Acts(PositiveInt | None),
    "steps_per_generation": Acts(PositiveInt | None),
    "temperature": Acts(Positive),
    "top_p": Acts(PositiveShare),
    "top_k": Acts(Count),
    "min_p": Acts(Share | None),
    "repetition_penalty": Refused(
        "the engines draw from the policy itself; a penalty makes another policy of it, whose probabilities "
        "they do not compute"
    ),
    "generation_kwargs": Acts(dict[str, Any] | None),
    "cache_implementation": Replaced(_CACHES | None, _ENGINE),
    "use_transformers_continuous_batching": Replaced(bool, _ENGINE),
    "transformers_continuous_batching_config": Replaced(dict[str, Any] | None, _ENGINE),
    "use_transformers_paged": Replaced(bool | None, _ENGINE),
    "max_tool_calling_iterations": Acts(PositiveInt | None),
    "chat_template_kwargs": Acts(dict[str, Any] | None),
    "pad_to_multiple_of": Acts(PositiveInt | Literal["auto"] | None),
    "use_vllm": Replaced(bool, _ENGINE),
    "vllm_mode": Replaced(Literal["server", "colocate"], _ENGINE),
    "vllm_model_impl": Replaced(Literal["vllm", "transformers", "auto"], _ENGINE),
    "vllm_enable_sleep_mode": Replaced(bool, _ENGINE),
    "vllm_structured_outputs_regex": Refused("the engines draw every token from the whole vocabulary"),
    "vllm_server_base_url": Replaced(Text | None, _ENGINE),
    "vllm_server_host": Replaced(Text, _ENGINE),
    "vllm_server_port": Replaced(PositiveInt, _ENGINE),
    "vllm_server_timeout": Replaced(NonNegative, _ENGINE),
    "vllm_group_port": Replaced(PositiveInt, _ENGINE),
    "vllm_gpu_memory_utilization": Replaced(PositiveShare, _ENGINE),
    "vllm_max_model_length": Replaced(PositiveInt | None, _ENGINE),
    "vllm_tensor_parallel_size": Replaced(PositiveInt, _ENGINE),
    # Loss
    "beta": Acts(NonNegative),
    "num_iterations": Acts(PositiveInt),
    "epsilon": Acts(NonNegative),
    "delta": Acts(Positive | None),
    "sapo_temperature_neg": Acts(Positive),
    "sapo_temperature_pos": Acts(Positive),
    "vespo_k_pos": Acts(NonNegative),
    "vespo_lambda_pos": Acts(NonNegative),
    "vespo_k_neg": Acts(NonNegative),
    "vespo_lambda_neg": Acts(NonNegative),
    "importance_sampling_level": Acts(Literal["token", "sequence"]),
    "reward_weights": Acts(Annotated[list[float], Field(min_length=1)] | None),
    "multi_objective_aggregation": Acts(Literal["sum_then_normalize", "normalize_then_sum"]),
    "scale_rewards": Acts(Literal["group", "batch", "none"] | bool),
    "sync_ref_model": Acts(bool),
    "ref_model_mixup_alpha": Acts(Share),
    "ref_model_sync_steps": Acts(PositiveInt),
    "top_entropy_quantile": Acts(Share),
    "entropy_coef": Acts(NonNegative),
    "use_adaptive_entropy": Acts(bool),
    "entropy_coef_min": Acts(NonNegative),
    "entropy_coef_max": Acts(NonNegative),
    "entropy_coef_delta": Acts(NonNegative),
    "entropy_target": Acts(NonNegative),
    "vllm_importance_sampling_correction": Acts(bool),
    "vllm_importance_sampling_clip_max": Acts(Positive | None),
    "vllm_importance_sampling_clip_min": Acts(NonNegative | None),
    "vllm_importance_sampling_cap": Refused("its name is vllm_importance_sampling_clip_max"),
    "off_policy_mask_threshold": Acts(Positive | None),
    "use_bias_correction_kl": Acts(bool),
}

_NEWER = Refused("it is newer than this version of qerl")
_ACTIVATION_CHECKPOINTING = {
    f"activation_checkpointing{end}": f"gradient_checkpointing{end}" for end in ("", "_kwargs")
}
_NEWER_NAMES = {
    newer: Refused(f"its older name, {older}, says the same in every version of transformers")
    for newer, older in _ACTIVATION_CHECKPOINTING.items()
}


def fate_of(name: str) -> Acts | Replaced | Refused | ForScripts:
    """What becomes of a parent's field; one that a newer transformers adds is refused."""
    return PARENTS.get(name) or _NEWER_NAMES.get(name, _NEWER)


def replacements(names: Sequence[str]) -> str:
    """The line in which a run says what takes the place of these fields."""
    by: dict[str, list[str]] = {}
    for name in names:
        fate = PARENTS[name]
        assert isinstance(fate, Replaced)
        by.setdefault(fate.by, []).append(name)
    said = "; ".join(f"{', '.join(group)}: {clause}" for clause, group in by.items())
    return f"Settings that ask for speed or memory are answered by what is built in. {said}."


def says_as_older(config: Any, name: str) -> bool:
    """Whether a field is a newer name of one that has the same value, as in a copy of settings."""
    older = _ACTIVATION_CHECKPOINTING.get(name)
    return older is not None and getattr(config, name) == getattr(config, older)


def set_newer_names(config: Any) -> None:
    """Sets what the installed transformers has newer names for, because it warns of the older ones."""
    for newer, older in _ACTIVATION_CHECKPOINTING.items():
        if hasattr(config, newer):
            setattr(config, newer, getattr(config, older))
