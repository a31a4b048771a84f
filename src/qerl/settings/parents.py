"""Fields of the parents, TRL's `GRPOConfig` and transformers' `TrainingArguments`, and their effect here.

Fields that transformers' trainer acts on are `TrainerFields`, the base of the group `run`; fields that the
trainer here acts on are declared in `qerl.settings.groups`. A field that asks for speed or memory without
changing results is replaced: it is accepted, and each run logs once what takes its place. Every other field
must keep its default, including those of newer versions of the parents that this version of QeRL does not
know.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, trainer_log_levels
from typing_extensions import TypedDict  # pydantic needs its backport before Python 3.12

from qerl.settings.checks import (
    STRICT,
    Count,
    Decoded,
    Group,
    NonNegative,
    Options,
    Positive,
    PositiveInt,
    PositiveShare,
    Seed,
    ShareBelow1,
    ShareOrSteps,
    Steps,
    Text,
)


class Dispatch(TypedDict, total=False):
    """Options of accelerate that leave batches as they are: which process reads a stream, and how batches get
    to the device."""

    __pydantic_config__ = STRICT | ConfigDict(extra="forbid")  # type: ignore[misc]

    dispatch_batches: bool
    non_blocking: bool


class Checkpointing(TypedDict, total=False):
    """Options of gradient checkpointing: torch's own, the interval of recomputed layers, and whether the
    inputs of these layers are offloaded to CPU memory."""

    __pydantic_config__ = STRICT | ConfigDict(extra="forbid")  # type: ignore[misc]

    every_n_layers: PositiveInt
    offload: bool
    use_reentrant: bool
    preserve_rng_state: bool
    determinism_check: Literal["default", "none"]
    debug: bool


def _one_of(values: Any) -> Any:
    return Literal[tuple(getattr(value, "value", value) for value in values)]


def _said_of_accelerate(value: Any) -> Any:
    """Return the options that differ from accelerate's defaults, or None; transformers makes an object of
    all."""
    if isinstance(value, AcceleratorConfig):
        value = value.to_dict()
    if not isinstance(value, dict):
        return value
    defaults = AcceleratorConfig().to_dict()
    return {name: x for name, x in value.items() if name not in defaults or x != defaults[name]} or None


_Reporter: Any = _one_of(["none", "all", *INTEGRATION_TO_CALLBACK])
_Reporters: Any = _Reporter | list[_Reporter]
_Scheduler: Any = _one_of(SchedulerType)
_Optimizer: Any = _one_of(OptimizerNames)
_Interval: Any = _one_of(IntervalStrategy)
_Save: Any = _one_of(SaveStrategy)
_Hub: Any = _one_of(HubStrategy)
_Level: Any = _one_of(trainer_log_levels)
_Accelerate = Annotated[Dispatch | None, BeforeValidator(_said_of_accelerate), Decoded]
_Multiple = Annotated[
    PositiveInt | Literal["auto"] | None,
    BeforeValidator(lambda value: int(value) if isinstance(value, str) and value.isdecimal() else value),
]


INHERITED: Any = None
"""Marks a field with its parent's default and description; None in a group if the installed parent lacks
it."""


class TrainerFields(Group):
    """Fields of transformers that act as they do there; types are narrower where transformers' are vague."""

    # Length of the run, batches, optimizer
    output_dir: Text | None = INHERITED
    per_device_train_batch_size: PositiveInt = INHERITED
    gradient_accumulation_steps: PositiveInt = INHERITED
    num_train_epochs: Positive = INHERITED
    max_steps: Literal[-1] | PositiveInt = INHERITED
    lr_scheduler_type: _Scheduler = INHERITED
    lr_scheduler_kwargs: Options | None = INHERITED
    warmup_steps: ShareBelow1 | Steps = INHERITED
    optim: _Optimizer = INHERITED
    optim_args: Text | None = INHERITED
    weight_decay: NonNegative = INHERITED
    adam_beta1: ShareBelow1 = INHERITED
    adam_beta2: ShareBelow1 = INHERITED
    adam_epsilon: NonNegative = INHERITED
    max_grad_norm: NonNegative = INHERITED
    pad_to_multiple_of: _Multiple = INHERITED
    # Precision and memory
    tf32: bool | None = INHERITED
    gradient_checkpointing: bool = INHERITED
    gradient_checkpointing_kwargs: Annotated[Checkpointing | None, Decoded] = INHERITED
    torch_empty_cache_steps: PositiveInt | None = INHERITED
    skip_memory_metrics: bool = INHERITED
    # Logging
    logging_strategy: _Interval = INHERITED
    logging_first_step: bool = INHERITED
    log_on_each_node: bool = INHERITED
    log_level: _Level = INHERITED
    log_level_replica: _Level = INHERITED
    disable_tqdm: bool | None = INHERITED
    report_to: _Reporters = INHERITED
    run_name: Text | None = INHERITED
    project: Text = INHERITED
    trackio_space_id: Text | None = INHERITED
    trackio_bucket_id: Text | None = INHERITED
    trackio_static_space_id: Text | Literal[False] | None = INHERITED
    # Evaluation
    eval_strategy: _Interval = INHERITED
    eval_steps: ShareOrSteps | None = INHERITED
    eval_delay: NonNegative = INHERITED
    eval_on_start: bool = INHERITED
    # Checkpoints and the Hub
    save_strategy: _Save = INHERITED
    save_steps: ShareOrSteps = INHERITED
    save_only_model: bool = INHERITED
    save_on_each_node: bool = INHERITED
    save_total_limit: PositiveInt | None = INHERITED
    load_best_model_at_end: bool = INHERITED
    greater_is_better: bool | None = INHERITED
    ignore_data_skip: bool = INHERITED
    restore_callback_states_from_checkpoint: bool = INHERITED
    resume_from_checkpoint: bool | Text | None = INHERITED
    push_to_hub: bool = INHERITED
    hub_model_id: Text | None = INHERITED
    hub_strategy: _Hub = INHERITED
    hub_private_repo: bool | None = INHERITED
    hub_always_push: bool = INHERITED
    hub_revision: Text | None = INHERITED
    # Seeds, data loaders, devices
    seed: Seed = INHERITED
    full_determinism: bool = INHERITED
    remove_unused_columns: bool | None = INHERITED
    dataloader_drop_last: bool = INHERITED
    dataloader_num_workers: Count = INHERITED
    dataloader_pin_memory: bool = INHERITED
    dataloader_persistent_workers: bool = INHERITED
    dataloader_prefetch_factor: PositiveInt | None = INHERITED
    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = INHERITED
    dataloader_in_order: bool = INHERITED
    accelerator_config: _Accelerate = INHERITED
    use_cpu: bool = INHERITED
    ddp_bucket_cap_mb: PositiveInt | None = INHERITED
    ddp_backend: Literal["nccl", "gloo", "mpi"] | None = INHERITED
    ddp_timeout: PositiveInt = INHERITED
    # Read by scripts alone
    do_train: bool = INHERITED
    do_eval: bool = INHERITED
    do_predict: bool = INHERITED


@dataclass(frozen=True)
class Replaced:
    """A field that only asks for speed or memory, which this project achieves in another way.

    Attributes:
        type: Type of the values that it accepts; the value is not kept.
        by: What takes its place, as a whole clause.
    """

    type: Any
    by: str


_ENGINE = "rollouts run on the built-in engine, on the weights that train"
_LAYERS = "the update has fused layers of its own"
_CACHES = Literal[
    "dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "offloaded_hybrid",
    "offloaded_hybrid_chunked", "hybrid", "hybrid_chunked", "sliding_window",
]  # fmt: skip
"""Kinds of transformers' cache that do not round."""

REPLACED = {
    "auto_find_batch_size": Replaced(bool, "an update that runs out of memory is split automatically"),
    "torch_compile": Replaced(bool, _LAYERS),
    "torch_compile_backend": Replaced(Text | None, _LAYERS),
    "torch_compile_mode": Replaced(Text | None, _LAYERS),
    "use_liger_kernel": Replaced(bool, _LAYERS),
    "liger_kernel_config": Replaced(Options | None, _LAYERS),
    "use_cache": Replaced(bool, _ENGINE),
    "cache_implementation": Replaced(_CACHES | None, _ENGINE),
    "use_transformers_continuous_batching": Replaced(bool, _ENGINE),
    "transformers_continuous_batching_config": Replaced(Options | None, _ENGINE),
    "use_transformers_paged": Replaced(bool | None, _ENGINE),
    "use_vllm": Replaced(bool, _ENGINE),
    "vllm_mode": Replaced(Literal["server", "colocate"], _ENGINE),
    "vllm_model_impl": Replaced(Literal["vllm", "transformers", "auto"], _ENGINE),
    "vllm_enable_sleep_mode": Replaced(bool, _ENGINE),
    "vllm_server_base_url": Replaced(Text | None, _ENGINE),
    "vllm_server_host": Replaced(Text, _ENGINE),
    "vllm_server_port": Replaced(PositiveInt, _ENGINE),
    "vllm_server_timeout": Replaced(NonNegative, _ENGINE),
    "vllm_group_port": Replaced(PositiveInt, _ENGINE),
    "vllm_gpu_memory_utilization": Replaced(PositiveShare, _ENGINE),
    "vllm_max_model_length": Replaced(PositiveInt | None, _ENGINE),
    "vllm_tensor_parallel_size": Replaced(PositiveInt, _ENGINE),
}

_DTYPE = "set dtype, which trainer and sampler share"
_TORCHRUN = "start a process for each GPU with torchrun"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "optim_target_modules", "average_tokens_across_devices", "label_smoothing_factor",
            "neftune_noise_alpha", "include_num_input_tokens_seen", "log_multimodal", "prediction_loss_only",
            "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
            "include_for_metrics", "batch_eval_metrics", "label_names", "enable_jit_checkpoint",
            "train_sampling_strategy", "length_column_name", "local_rank", "ddp_static_graph",
            "ddp_broadcast_buffers", "ddp_find_unused_parameters", "ds3_gather_for_generation", "debug",
            "repetition_penalty", "vllm_structured_outputs_regex",
        ),
        "",
    ),
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), _DTYPE),
    **dict.fromkeys(("parallelism_config", "fsdp", "fsdp_config", "deepspeed"), _TORCHRUN),
    "activation_checkpointing": "set gradient_checkpointing",
    "activation_checkpointing_kwargs": "set gradient_checkpointing_kwargs",
    "data_seed": "set seed, which the order of the data follows",
    "hub_token": "set the environment variable HF_TOKEN",
    "vllm_importance_sampling_cap": "set vllm_importance_sampling_clip_max",
}  # fmt: skip
"""Fields that must keep their defaults, and what to do instead if there is a single way."""

NEWER_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Newer versions' names of transformers' fields, by which every version has the older name."""


def default_of(spec: dataclasses.Field) -> Any:
    """Return the default value of a dataclass field."""
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def shown(value: Any) -> str:
    """Format a value as a recipe has it."""
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "true", False: "false"}[value]
    text = str(getattr(value, "value", value))
    return text if text and text.isprintable() else json.dumps(text)


def set_newer_names(config: Any) -> None:
    """Set the newer names that the installed transformers has, because it warns of the older ones."""
    for newer, older in NEWER_NAMES.items():
        if hasattr(config, newer):
            setattr(config, newer, getattr(config, older))


def replacements(names: Sequence[str]) -> str:
    """Return the line in which a run logs what takes the place of these fields."""
    by: dict[str, list[str]] = {}
    for name in names:
        by.setdefault(REPLACED[name].by, []).append(name)
    said = "; ".join(f"{', '.join(group)}: {clause}" for clause, group in by.items())
    return f"These settings have no effect, because QeRL has built-in replacements. {said}."
