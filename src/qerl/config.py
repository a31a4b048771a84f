"""Settings of a run: one flat dataclass, read from recipes.

`QeRLConfig` is TRL's `GRPOConfig` with the fields this project adds: which weights, which adapter, which
task, which noise. A recipe is a YAML file whose keys are these fields. Several recipes are merged from left
to right, so that a task, a model size and a tuning method each live in one small file; fields given on the
command line come last. Unknown keys are errors that name the nearest valid key.
"""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml
from trl import GRPOConfig

from qerl.errors import QeRLError
from qerl.model import Weights
from qerl.noise import SCHEDULES
from qerl.nvfp4.format import Method
from qerl.rollout.engine import KvCacheDtype

# What an algorithm sets where the recipe says nothing.
# grpo: arXiv 2402.03300. dapo: arXiv 2503.14476, sections 3.1 (clip-higher) to 3.4 (soft overlong punishment,
# whose interval there is a fifth of the longest response). DAPO's authors punish truncated samples instead of
# masking them; both at once would leave short wrong answers with an advantage and nothing against it.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {
        "loss_type": "grpo",
        "epsilon_high": 0.2,
        "mask_truncated_completions": False,
        "dynamic_sampling_rounds": 0,
        "overlong_buffer": 0.0,
        "signal": "reward",
    },
    "dapo": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "mask_truncated_completions": False,
        "dynamic_sampling_rounds": 2,
        "overlong_buffer": 0.2,
        "signal": "accuracy",
    },
}


def _help(text: str, default: Any = dataclasses.MISSING, factory: Any = dataclasses.MISSING) -> Any:
    return field(default=default, default_factory=factory, metadata={"help": text})


@dataclass
class QeRLConfig(GRPOConfig):
    """Everything a run needs to know; the fields of `trl.GRPOConfig` and of `TrainingArguments` are valid
    too."""

    model: str | None = _help("Hub id, local folder or .gguf file of the base model; required.", None)
    weights: Weights = _help(
        "Format of the frozen linears: nvfp4, mxfp4, nf4 or bf16 (unquantised).", "nvfp4"
    )
    rounding: Method = _help("How an unquantised checkpoint is rounded while loading.", "mse")
    dtype: Literal["auto", "float32", "bfloat16"] = _help(
        "Of activations, embeddings, norms and head. "
        "auto: float32 on the CPU and for full tuning, bfloat16 otherwise.",
        "auto",
    )
    tuning: Literal["lora", "full"] = _help(
        "Train LoRA adapters or all weights (full: bf16 weights only).", "lora"
    )
    lora_r: int = _help("Rank of the adapters.", 32)
    lora_alpha: int = _help("Numerator of LoRA's scale alpha / r.", 64)
    lora_dropout: float = _help("Dropout on the adapters' input.", 0.0)
    lora_target_modules: list[str] | None = _help("Names of adapted linears; null adapts all seven.", None)

    task: str | None = _help(
        "Task to train on (gsm8k, bigmath, arithmetic, jsonl:PATH, ...); required.", None
    )
    task_options: dict[str, Any] = _help(
        "Keyword arguments of the task, for example {level: wp1}.", factory=dict
    )
    reward_files: list[str] = _help("Reward functions of your own, each PATH.py:function.", factory=list)
    reward_timeout: float = _help("Seconds a reward function may take for one sample.", 10.0)
    reward_errors: Literal["stop", "tolerate"] = _help(
        "A reward function that fails on every sample of a step ends the run (stop) or gives zeros "
        "(tolerate).",
        "stop",
    )
    max_prompt_length: int | None = _help(
        "Longest prompt in tokens; longer ones are left out and counted.", None
    )
    eval_samples: int = _help("Held-out problems for evaluation while training.", 64)

    algorithm: Literal["grpo", "dapo"] = _help("Preset for the fields below that are left unset.", "grpo")
    loss_type: str | None = _help("As in TRL; unset, the algorithm decides.", None)
    epsilon_high: float | None = _help("Upper clip distance; unset, the algorithm decides.", None)
    mask_truncated_completions: bool | None = _help("Leave truncated samples out of the loss.", None)
    dynamic_sampling_rounds: int | None = _help(
        "Extra rollouts at most per step, each replacing groups without signal.", None
    )
    signal: Literal["accuracy", "reward"] | None = _help(
        "Which groups teach. accuracy: those with right and wrong samples, by the reward function `accuracy` "
        "or the only one (right is above 0). reward: those whose rewards differ. Unset, the algorithm "
        "decides.",
        None,
    )
    overlong_buffer: float | None = _help(
        "Share of max_completion_length over which the length penalty grows from 0 to -1; 0 turns it off.",
        None,
    )

    noise: bool = _help("Adaptive quantization noise in the RMSNorm weights of rollouts.", True)
    noise_sigma_start: float = _help("Standard deviation in the first noisy stage.", 1e-2)
    noise_sigma_end: float = _help("Standard deviation in the last stage.", 5e-4)
    noise_stages: int = _help("Stages of the schedule, the first without noise.", 10)
    noise_schedule: str = _help(f"Decay over the stages: {', '.join(SCHEDULES)}.", "exponential")

    max_sequences: int | None = _help(
        "Sequences decoded at the same time; unset, at most 64 (portable engine) or 512 (paged engine).",
        None,
    )

    kv_cache_dtype: KvCacheDtype = _help(
        "Keys and values of rollouts: auto (bfloat16) or fp8 (E4M3 without scales: half the memory, paged "
        "engine only). Experimental: see `qerl bench parity --kv-cache-dtype fp8` for your model.",
        "auto",
    )

    tokens_per_forward: int | None = _help(
        "Most tokens in one forward pass of the update; a microbatch with more is computed in pieces, with "
        "the same gradients. Unset: on a GPU what `qerl plan` finds to fit, on the CPU no limit.",
        None,
    )

    # Fields of the parents whose defaults differ here.
    bf16: bool | None = _help(
        "Autocast is not used: `dtype` sets the precision of sampler and trainer alike.", False
    )
    metric_for_best_model: str | None = _help(
        "What load_best_model_at_end goes by; unset, eval_reward. Evaluations compute no loss.", None
    )
    logging_steps: float = _help("Optimizer steps between two log lines.", 1)
    vllm_importance_sampling_mode: str = _help(
        "Correction of the ratio trainer / sampler. Token-level truncation suits noisy rollouts.",
        "token_truncate",
    )
    ddp_broadcast_buffers: bool | None = _help(
        "Stays off: the packed weights are buffers, which never change, and ranks differ in forward passes.",
        False,
    )
    ddp_find_unused_parameters: bool | None = _help(
        "Stays off: every process computes a sample in each backward pass, so all adapters have a gradient.",
        False,
    )
    disable_tqdm: bool | None = _help("The run shows its own progress bar.", True)

    def __post_init__(self) -> None:
        self._check()
        if self.mask_truncated_completions and self.overlong_buffer is None:
            self.overlong_buffer = 0.0  # masked samples are not punished as well
        for name, value in ALGORITHMS[self.algorithm].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._choose_metric()
        if not torch.cuda.is_available():
            self.dataloader_pin_memory = False  # there is nothing to pin for
        try:
            super().__post_init__()
        except ValueError as error:
            raise QeRLError(f"The settings contradict each other: {error}") from error
        self._check_groups()

    def _check(self) -> None:
        """Contradictions between fields, before anything is loaded."""
        _one_of("algorithm", self.algorithm, tuple(ALGORITHMS))
        _one_of("weights", self.weights, get_args(Weights))
        _one_of("tuning", self.tuning, ("lora", "full"))
        _one_of("rounding", self.rounding, get_args(Method))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KvCacheDtype))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        if self.signal is not None:
            _one_of("signal", self.signal, ("accuracy", "reward"))
        _one_of("reward_errors", self.reward_errors, ("stop", "tolerate"))
        _one_of("noise_schedule", self.noise_schedule, tuple(SCHEDULES))
        if self.tuning == "full" and self.weights != "bf16":
            raise QeRLError(
                f"tuning: full cannot train packed {self.weights} weights; set weights: bf16 or tuning: lora."
            )
        if self.lora_r < 1:
            raise QeRLError(f"lora_r is {self.lora_r}; a LoRA rank is at least 1.")
        if self.tokens_per_forward is not None and self.tokens_per_forward < 1:
            raise QeRLError(
                f"tokens_per_forward is {self.tokens_per_forward}; it is a number of tokens, at least 1."
            )
        kwargs = self.gradient_checkpointing_kwargs
        every = kwargs.get("every_n_layers", 1) if isinstance(kwargs, dict) else 1
        if not isinstance(every, int) or every < 1:
            raise QeRLError(
                f"every_n_layers in gradient_checkpointing_kwargs is {every}; it is a number of layers, at "
                "least 1. To recompute none, set gradient_checkpointing: false."
            )
        if self.noise and self.noise_stages < 2:
            raise QeRLError(
                f"noise_stages is {self.noise_stages}; the first stage has no noise, so at least 2 are "
                "needed (or set noise: false)."
            )
        if self.bf16 or self.fp16:
            raise QeRLError(
                "bf16/fp16 autocast would make the trainer's policy differ from the sampler's; "
                "set dtype instead."
            )
        if self.ddp_broadcast_buffers:
            raise QeRLError(
                "ddp_broadcast_buffers would send the packed weights before every forward pass; remove it."
            )
        if self.use_vllm:
            raise QeRLError("use_vllm cannot be combined with the built-in rollout engine; remove it.")
        self._check_reference()
        if self.repetition_penalty != 1.0 or self.generation_kwargs:
            raise QeRLError(
                "repetition_penalty and generation_kwargs are not supported by the rollout engine; "
                "remove them."
            )
        if self.mask_truncated_completions and self.overlong_buffer:
            raise QeRLError(
                "mask_truncated_completions leaves out the samples that overlong_buffer punishes; set one of "
                "the two."
            )
        if self.overlong_buffer is not None and not 0 <= self.overlong_buffer < 1:
            raise QeRLError(
                f"overlong_buffer is {self.overlong_buffer}; it is a share of the length, from 0 to 1."
            )

    def _check_reference(self) -> None:
        if self.sync_ref_model and self.beta == 0.0:
            raise QeRLError(
                "sync_ref_model has no reference to move: beta is 0; set beta, or remove sync_ref_model."
            )
        if self.sync_ref_model and self.tuning != "full":
            raise QeRLError(
                "sync_ref_model needs tuning: full; with LoRA the reference is the base model, which never "
                "moves. Remove sync_ref_model, or train all weights."
            )

    def _choose_metric(self) -> None:
        """An evaluation has rewards and no loss, so the best checkpoint is the one with the highest."""
        if self.metric_for_best_model in ("loss", "eval_loss"):
            raise QeRLError(
                "metric_for_best_model is eval_loss, which an evaluation does not compute; leave it out for "
                "eval_reward, or name another metric of the evaluation."
            )
        by_metric = self.load_best_model_at_end or self.lr_scheduler_type == "reduce_lr_on_plateau"
        if by_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_reward"

    def _check_groups(self) -> None:
        """Every process samples whole groups, so that a group's prompt is computed once."""
        local = self.per_device_train_batch_size * (self.steps_per_generation or 1)
        if local % (self.num_generations or 1):
            raise QeRLError(
                f"A process samples {local} completions at a time (per_device_train_batch_size x "
                f"steps_per_generation), which num_generations = {self.num_generations} does not divide; "
                "change one of them."
            )
        groups = self.num_generations_eval or self.num_generations or 1
        if self.eval_strategy != "no" and self.per_device_eval_batch_size % groups:
            raise QeRLError(
                f"per_device_eval_batch_size is {self.per_device_eval_batch_size}, which groups of {groups} "
                "(num_generations_eval, else num_generations) do not divide; change one of them."
            )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise QeRLError(f"{name} is {value!r}; it must be one of {', '.join(choices)}.")


FIELDS = {f.name: f for f in dataclasses.fields(QeRLConfig) if f.init}

# Set from other fields when settings are made; TRL refuses to be given the first beside steps_per_generation.
_DERIVED = {"generation_batch_size", "debug", "pad_to_multiple_of"}

# YAML 1.1 reads 1e-5 as a string because the point is missing.
_FLOAT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def parse_value(text: str) -> Any:
    """Value of a command-line field, by YAML's rules and with 1e-5 as a number."""
    return _numbers(yaml.safe_load(text))


def _numbers(value: Any) -> Any:
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value


def check_key(key: str, where: str) -> None:
    """Raise for a key that is no field, naming the nearest one."""
    if key in FIELDS:
        return
    own = difflib.get_close_matches(str(key), QeRLConfig.__annotations__, n=1, cutoff=0.7)
    near = own or difflib.get_close_matches(str(key), FIELDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "see `qerl train --help` for the fields."
    raise QeRLError(f"{where} has the unknown key {key!r}; {hint}")


def read_recipe(path: Path) -> dict[str, Any]:
    """Fields that one recipe file sets.

    Raises:
        QeRLError: The file is missing, is not a YAML mapping, or has an unknown key.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QeRLError(f"The recipe {path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise QeRLError(f"The recipe {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise QeRLError(f"The recipe {path} must be a mapping of field names to values.")
    for key in values:
        check_key(key, f"The recipe {path}")
    return _numbers(values)


def load_config(recipes: Sequence[str | Path], overrides: dict[str, Any]) -> QeRLConfig:
    """Settings from recipes, later ones over earlier ones, and command-line fields over all.

    Raises:
        QeRLError: An unknown key, a contradiction, or a required field that is not set.
    """
    values: dict[str, Any] = {}
    for path in recipes:
        values |= read_recipe(Path(path))
    for key in overrides:
        check_key(key, "The command line")
    values |= overrides
    for required in ("model", "task", "output_dir"):
        if not values.get(required):
            raise QeRLError(f"{required} is not set; add it to the recipe or pass --{required}.")
    try:
        return QeRLConfig(**values)
    except (TypeError, ValueError) as error:
        raise QeRLError(f"The settings are not valid: {error}") from error


def resolved(config: QeRLConfig) -> dict[str, Any]:
    """Fields that belong to this project or differ from their defaults, as plain YAML values."""
    own = QeRLConfig.__annotations__
    out = {}
    for name, spec in FIELDS.items():
        value = getattr(config, name)
        default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
        if name not in _DERIVED and (name in own or value != default):
            out[name] = getattr(value, "value", value)
    return {name: value for name, value in out.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


def dump(config: QeRLConfig) -> str:
    """The resolved settings as a recipe that gives the same run."""
    return yaml.safe_dump(resolved(config), sort_keys=False)
