"""The arguments of `QeRLTrainer`, checked and completed to the parts of a trainer.

The constructor has TRL's parameters. Each of them acts as TRL documents, or is refused with the reason; none
is silently ignored, and two parameters that say the same thing must agree.

- **model** may be a name (Hub id, folder, .gguf file): then it is loaded as `qerl train` loads it, in the
  format that the settings name, with the adapter of ``peft_config`` or else of the settings. A loaded model
  or `PeftModel` is used as it is, and the settings that describe a model (``weights``, ``lora_r``, ...) must
  agree with it. Unset ones are filled in from the model, because they are saved beside the weights and
  evaluation reads them.
- **args** may be a `QeRLConfig`, TRL's `GRPOConfig` (see `qerl.settings.config.as_ours`) or missing. The
  trainer works with a copy.
- **Settings that only a run has** (``task``, ``reward_files``, ``eval_samples``) name the source of an object
  that is passed in here; they are refused if set. `trainer.run` applies them before it makes a trainer, and
  lists them in ``acted_on``. A field at its default counts as not set.
"""

import copy
from collections.abc import Collection, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOConfig
from trl.data_utils import is_conversational

from qerl.agents.conversations import Others, check_others, rows_for
from qerl.agents.template import check_template
from qerl.agents.thinking import stops_of
from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.lora.adapter import adapt, check_lora
from qerl.models.hub import LocalModel, find_model
from qerl.models.load import load_tokenizer
from qerl.rollout.engine import RolloutEngine, takes
from qerl.rollout.select import make_engine
from qerl.rollout.stops import Stop
from qerl.settings.adapter import LORA_FIELDS, plain, take_adapter
from qerl.settings.config import QeRLConfig, as_ours, default_of
from qerl.settings.recipe import FIELDS
from qerl.tasks.together import Together
from qerl.trainer.data import check_metric, sound_data, streams_as_given
from qerl.trainer.demonstrations import ReadyDemonstrations, check_prompts
from qerl.trainer.model_in_hand import check_dtype, check_optimizer, check_whole, held, weights_of
from qerl.trainer.policy import check_trainable, make_policy
from qerl.trainer.prompts import ReadyPrompts
from qerl.trainer.ready import check_policy
from qerl.trainer.rewards import (
    episode_rewards_of,
    guard_rewards,
    one_for_each,
    with_length_penalty,
)
from qerl.trainer.teacher import check_teacher_prompt

REFUSED = {
    "quantization_config": "the field `weights` of the settings says how a model is quantised",
}
"""Arguments of TRL's constructor that must be left out, and why."""

_NO_ROLLOUT = "algorithm: sft learns from demonstrations, and its evaluations sample one turn"

_OF_A_RUN = {
    "task": "hand the data to the trainer as train_dataset",
    "task_options": "hand the data to the trainer as train_dataset",
    "reward_files": "hand the functions to the trainer as reward_funcs",
    "judge": "hand a `qerl.rewards.judge.Judge` to the trainer among reward_funcs",
    "eval_samples": "select the rows of eval_dataset",
    "tools": "hand the functions to the trainer as tools",
    "environment": "hand the class to the trainer as environment_factory",
    "environment_options": "hand the trainer an environment_factory that has them",
    "resume_from_checkpoint": "`trainer.train` takes it",
}
_OF_A_NAMED_MODEL = {
    "model": "the model was handed in loaded",
    "rounding": "`load_model` takes it",
    "adapter": "`load_adapter(model, folder, trainable=True)` puts it on the model",
}
_OF_A_MADE_ENGINE = {
    "max_sequences": "`make_engine` takes it",
    "kv_cache_dtype": "`make_engine` takes it",
}
_OF_OTHERS = dict.fromkeys(
    ("tool_timeout", "tool_errors", "tool_output_limit", "max_tool_calling_iterations"),
    "there are neither tools nor environments",
)
_OF_OUR_SAMPLING = dict.fromkeys(
    ("stop_strings", "thinking_budget", "thinking_end"),
    "rollout_func samples in the engine's place",
)
RUN_FIELDS = frozenset(
    {*_OF_A_RUN, *_OF_A_NAMED_MODEL, *_OF_A_MADE_ENGINE, *LORA_FIELDS, "weights", "tuning", "dtype"}
    | {"max_prompt_length"}
)
"""Fields that `trainer.run.build` acts on before it makes a trainer."""


@dataclass(frozen=True)
class Completed:
    """The parts of a trainer.

    Attributes:
        model: The policy, loaded and with its adapter.
        args: Settings that agree with the model; a copy of the user's.
        engine: Samples from the policy.
        tokenizer: The policy's tokenizer.
        processing_class: The processor that was passed in, else the tokenizer.
        train_dataset, eval_dataset: Checked and filtered by length; an evaluation stream as it was given.
        rewards: Reward functions and reward models, those of environments last.
        episode_rewards: Rewards of environments, each of weight 1, as in TRL.
        reward_processing_classes: Tokenizers of reward models, one entry per reward.
        calls: Runs waiting reward functions and tools concurrently.
        others: Tools and environments.
        stops: Conditions besides stop tokens that end or interrupt turns.
        ready: Prepares rows that are passed in later.
    """

    model: PreTrainedModel | PeftModel
    args: QeRLConfig
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    rewards: list[Any]
    episode_rewards: list[Any]
    reward_processing_classes: Any
    calls: Together
    others: Others
    stops: tuple[Stop, ...]
    ready: ReadyPrompts | ReadyDemonstrations


def complete(
    model: Any,
    reward_funcs: Any,
    args: GRPOConfig | None,
    train_dataset: Any,
    eval_dataset: Any,
    *,
    processing_class: Any,
    reward_processing_classes: Any,
    optimizers: tuple[Any, Any],
    peft_config: Any,
    engine: RolloutEngine | None,
    acted_on: Collection[str],
    tools: Any,
    environment_factory: Any,
    rollout_func: Any,
    refused: dict[str, Any],
) -> Completed:
    """Check, load and wrap the constructor's arguments; checks that need no model come first.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes,
            optimizers, peft_config, engine, acted_on, tools, environment_factory, rollout_func: As in
            `QeRLTrainer`.
        refused: The arguments named in `REFUSED`, as given.

    Raises:
        QeRLError: An argument is missing, is refused, contradicts another one, or cannot be loaded.
    """
    others = _others(tools, environment_factory, rollout_func)
    demonstrations = getattr(args, "algorithm", None) == "sft"
    if demonstrations and (others or rollout_func is not None):
        raise QeRLError(f"{_NO_ROLLOUT}; leave tools, environment_factory and rollout_func out.")
    _check_given(model, train_dataset, peft_config, engine, others, refused)
    named = isinstance(model, str | Path)
    settings = _settings(args, model, peft_config)
    _check_rewards(reward_funcs, settings, others)
    prompts = (settings.generation_batch_size or 0) // (settings.num_generations or 1)
    train_dataset = rows_for(others, train_dataset, prompts, settings.max_steps)
    _check_fields(settings, acted_on, named, engine, others, rollout_func)
    if others.endpoints:
        _check_endpoints(settings)
    if settings.max_staleness:
        _check_staleness(settings, bool(others), rollout_func is not None, engine)
    columns = getattr(train_dataset, "column_names", None)
    if settings.teacher_prompt is not None and columns is not None:
        check_teacher_prompt(settings.teacher_prompt, columns)
    given_rows = eval_dataset
    if not demonstrations:
        train_dataset, eval_dataset = sound_data(
            settings, train_dataset, eval_dataset, bool(others.factories)
        )
    calls = Together()
    check_metric(settings.metric_for_best_model, eval_dataset)
    if named:
        model = find_model(model)
        check_trainable(settings, model)
    tokenizer = _tokenizer(processing_class, model, train_dataset, settings.trust_remote_code)
    _check_template(others, tokenizer)
    stops = stops_of(settings, tokenizer)  # refuses a model that does not think, before it is loaded
    in_turns = bool(others) or rollout_func is not None
    ready = ready_of(model, settings, tokenizer, in_turns=in_turns)
    if "max_prompt_length" not in acted_on:  # `trainer.run` has prepared the rows of a run
        train_dataset = ready(train_dataset, "training prompts")
        eval_dataset = ready(eval_dataset, "evaluation prompts")
    policy = _policy(model, settings, peft_config, engine, acted_on)
    check_optimizer(optimizers[0], policy)
    check_policy(policy, settings, engine)
    episode_rewards = episode_rewards_of(others.judges)
    rewards = _rewards(reward_funcs, settings, episode_rewards, calls)
    if demonstrations and rewards:
        check_prompts(eval_dataset)
    if others.factories:
        settings.make_room_for_environments()
    return Completed(
        model=policy,
        args=settings,
        engine=engine or _engine(policy, tokenizer, settings),
        tokenizer=tokenizer,
        processing_class=processing_class or tokenizer,
        train_dataset=train_dataset,
        eval_dataset=streams_as_given(given_rows, eval_dataset),
        rewards=rewards,
        episode_rewards=episode_rewards,
        reward_processing_classes=one_for_each(reward_processing_classes, reward_funcs, rewards),
        calls=calls,
        others=others,
        stops=stops,
        ready=ready,
    )


def ready_of(
    model: Any, args: QeRLConfig, tokenizer: PreTrainedTokenizerBase, in_turns: bool
) -> ReadyPrompts | ReadyDemonstrations:
    """Return the row preparation for the settings' algorithm; arguments and errors as `ReadyPrompts.of`."""
    prompts = ReadyPrompts.of(model, args, tokenizer, in_turns)
    return ReadyDemonstrations(args, tokenizer, prompts.positions) if args.algorithm == "sft" else prompts


def _others(tools: Any, environment_factory: Any, rollout_func: Any) -> Others:
    """Check and return tools and environments; none with a `rollout_func`, which samples by itself."""
    if rollout_func is None:
        return check_others(tools, environment_factory)
    if not callable(rollout_func):
        raise QeRLError(f"rollout_func is a {type(rollout_func).__name__}; pass a function.")
    if tools or environment_factory:
        raise QeRLError(
            "rollout_func replaces the sampling that calls tools and environments, so they cannot be "
            "combined; pass one of them."
        )
    return Others()


def _check_template(others: Others, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if the chat template is missing or cannot render these conversations."""
    if (
        others and not others.texts and not others.endpoints
    ):  # also for an environment without a tool, as in TRL
        check_template(tokenizer)
    elif others and tokenizer.chat_template is None:
        raise QeRLError(
            "An environment needs a chat template, which the model lacks; put a chat_template.jinja beside "
            "it."
        )


def _rewards(
    reward_funcs: Any, settings: QeRLConfig, episode_rewards: list[Any], calls: Together
) -> list[Any]:
    """Return the user's rewards and those of environments, guarded.

    Raises:
        QeRLError: `reward_weights` is set, and does not have one number per reward of the user's.
    """
    if settings.reward_weights is not None:
        given = len(with_length_penalty(reward_funcs, settings))
        if len(settings.reward_weights) != given:
            penalty = ", the length penalty (overlong_buffer) among them" if settings.overlong_buffer else ""
            raise QeRLError(
                f"reward_weights has {len(settings.reward_weights)} numbers, and there are {given} reward "
                f"functions{penalty}; give one for each."
            )
    every = with_length_penalty(reward_funcs, settings) + episode_rewards
    return guard_rewards(every, settings.reward_timeout, calls)


def _check_rewards(reward_funcs: Any, settings: QeRLConfig, others: Others) -> None:
    """Raise if there is no reward, no teacher with `distillation_weight` 1, and no `algorithm: sft`."""
    taught = settings.teacher is not None and settings.distillation_weight == 1.0
    if not (reward_funcs or others.judges or taught or settings.algorithm == "sft"):
        raise QeRLError(
            "reward_funcs is missing; pass a reward function, a list of them, or an environment with "
            "get_reward()."
        )


def _check_given(
    model: Any,
    train_dataset: Any,
    peft_config: Any,
    engine: Any,
    others: Others,
    refused: dict[str, Any],
) -> None:
    """Raise if an argument is missing, of the wrong type, or not supported."""
    for name, value in refused.items():
        if value:
            raise QeRLError(f"{name} is not supported: {REFUSED[name]}; leave it out.")
    if train_dataset is None and others.factories:
        pass  # the environment has the data
    elif train_dataset is None:
        raise QeRLError("train_dataset is missing; pass a data set with a column `prompt`.")
    elif not isinstance(train_dataset, Dataset | IterableDataset):
        raise QeRLError(
            f"train_dataset is a {type(train_dataset).__name__}; pass a Dataset or IterableDataset (of a "
            "DatasetDict, one of its splits)."
        )
    if not isinstance(model, str | Path | PreTrainedModel | PeftModel):
        raise QeRLError(
            f"model is a {type(model).__name__}; pass a Hub id, a folder, or a causal language model of "
            "transformers."
        )
    if isinstance(model, nn.Module):
        check_whole(model)
    if peft_config is not None:
        check_lora(peft_config)
    if engine is not None and not isinstance(engine, RolloutEngine):
        raise QeRLError(
            f"engine is a {type(engine).__name__}; leave it out, or pass what "
            "qerl.rollout.select.make_engine made of the model."
        )


# Settings


def _settings(args: GRPOConfig | None, model: Any, peft_config: Any) -> QeRLConfig:
    """Return a copy of the user's settings as a `QeRLConfig`."""
    if isinstance(args, QeRLConfig):
        return copy.copy(args)
    named = isinstance(model, str | Path)
    if args is None:
        name = str(model) if named else str(base_model(model).name_or_path or "model")
        return QeRLConfig(output_dir=f"{Path(name).name}-GRPO", **_tuning(model, peft_config))
    if not isinstance(args, GRPOConfig):
        raise QeRLError(f"args is a {type(args).__name__}; pass a QeRLConfig, or a GRPOConfig of TRL.")
    own = _tuning(model, peft_config)
    if named and not args.bf16 and not {"dtype", "torch_dtype"} & (args.model_init_kwargs or {}).keys():
        own["dtype"] = "float32"  # TRL's default
    return as_ours(args, **own)


def _tuning(model: Any, peft_config: Any) -> dict[str, Any]:
    """Return the `tuning` and `weights` implied by a loaded model, for settings without these fields."""
    whole = isinstance(model, PreTrainedModel) and peft_config is None
    return {"tuning": "full", "weights": "bf16"} if whole else {}


def _check_fields(
    args: QeRLConfig,
    acted_on: Collection[str],
    named: bool,
    engine: RolloutEngine | None,
    others: Others,
    rollout_func: Any,
) -> None:
    """Raise if a field is set that this trainer does not read."""
    idle = dict(_OF_A_RUN)
    if not others and rollout_func is None:
        idle |= _OF_OTHERS
    if not named:
        idle |= _OF_A_NAMED_MODEL
    if engine is not None:
        idle |= _OF_A_MADE_ENGINE
    if rollout_func is not None:
        idle |= _OF_OUR_SAMPLING
    for name in sorted(idle.keys() & _set_fields(args, acted_on, idle.keys())):
        raise QeRLError(f"{name} has no effect here ({idle[name]}); remove it.")


_NOT_OF_AGENTS = {
    "thinking_budget": "each request has its own token limit",
    "teacher_prompt": "an agent makes the prompts",
    "max_tool_calling_iterations": "the agent decides on its number of turns",
    "tool_timeout": "its time limit is timeout in environment_options",
    "tool_errors": "an agent calls its tools itself",
    "tool_output_limit": "an agent calls its tools itself",
}
"""Fields without effect when external agents lead the conversations."""


def _check_endpoints(args: QeRLConfig) -> None:
    """Raise if a setting does not work with external agents behind the endpoint.

    Raises:
        QeRLError: A field without effect is set, or there are several processes, whose updates would need
            equal numbers of samples.
    """
    for name, why in _NOT_OF_AGENTS.items():
        if getattr(args, name) != default_of(FIELDS[name]):
            raise QeRLError(f"{name} has no effect on an agent behind the endpoint ({why}); remove it.")
    if args.world_size > 1:
        raise QeRLError(
            f"Agents behind the endpoint need a single process, and there are {args.world_size}: histories "
            "that an agent rewrites become further samples, so processes would have different numbers of "
            "them. Start one process."
        )


def _check_staleness(
    args: QeRLConfig, others: bool, rollout_func: bool, engine: RolloutEngine | None
) -> None:
    """Raise if samples cannot be kept in the engine across an update.

    Raises:
        QeRLError: Tools, environments or a `rollout_func` take part, there are several processes, or the
            sessions of the user's own engine cannot be continued.
    """
    if others or rollout_func:
        who = "rollout_func samples by itself" if rollout_func else "tools or environments answer the policy"
        raise QeRLError(
            f"max_staleness supports only samples of one turn from the engine, and {who}; set max_staleness: "
            "0."
        )
    if args.world_size > 1:
        raise QeRLError(
            f"max_staleness needs a single process, and there are {args.world_size}; start one, or set "
            "max_staleness: 0."
        )
    if engine is not None and (
        getattr(engine.session, "__func__", None) is RolloutEngine.session
        or not takes(engine.session, "going_on")
    ):
        raise QeRLError(
            "max_staleness needs an engine whose `session` takes the argument `going_on`, and that of "
            f"{type(engine).__name__} does not; add it as in RolloutEngine.session, or set max_staleness: 0."
        )


def _set_fields(args: QeRLConfig, acted_on: Collection[str], fields: Set[str] = RUN_FIELDS) -> set[str]:
    """Return the given fields that are not at their default, without those in ``acted_on``."""
    return {name for name in fields - {*acted_on} if getattr(args, name) != default_of(FIELDS[name])}


# Model


def _policy(
    model: LocalModel | PreTrainedModel | PeftModel,
    args: QeRLConfig,
    peft_config: LoraConfig | None,
    engine: RolloutEngine | None,
    acted_on: Collection[str],
) -> PreTrainedModel | PeftModel:
    if isinstance(model, LocalModel):
        return _named_policy(model, args, peft_config, engine)
    return _policy_in_hand(model, args, peft_config, acted_on)


def _named_policy(
    model: LocalModel, args: QeRLConfig, peft_config: LoraConfig | None, engine: RolloutEngine | None
) -> PreTrainedModel | PeftModel:
    """Load the model as `qerl train` would, with the adapter that the user describes."""
    if args.model not in (None, model.name):
        raise QeRLError(f"model is {model} and args.model is {args.model}; leave one of them out.")
    if model.folder.resolve() == Path(str(args.output_dir)).resolve():
        raise QeRLError(
            f"output_dir is the folder of the model, {model.folder}, whose files training would overwrite; "
            "choose another one."
        )
    if engine is not None and engine.model is not None:
        raise QeRLError(
            "The engine samples from another model object than the one that is loaded by its name here; "
            "leave engine out, or pass the engine's model as model."
        )
    args.model = model.name
    if peft_config is not None:
        if args.adapter is not None:
            raise QeRLError(
                "peft_config describes a new adapter and `adapter` names a saved one; remove one of them."
            )
        take_adapter(args, vars(peft_config), "peft_config")
    console = Console(quiet=args.process_index != 0)
    policy = make_policy(args, model, console, peft_config)
    if peft_config is not None:  # the layers that a pattern, or PEFT's default, matched
        args.lora_target_modules = held(policy)["lora_target_modules"]
    return policy


def _policy_in_hand(
    model: PreTrainedModel | PeftModel,
    args: QeRLConfig,
    peft_config: LoraConfig | None,
    acted_on: Collection[str],
) -> PreTrainedModel | PeftModel:
    """Return the model that was passed in, with a fresh adapter if ``peft_config`` is given."""
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise QeRLError(
                "The model has an adapter already and peft_config asks for another; pass one of the two."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise QeRLError(
                "The adapter of the model is frozen; load it with is_trainable=True, or with "
                "`load_adapter(model, folder, trainable=True)`."
            )
    elif peft_config is not None:
        take_adapter(args, vars(peft_config), "peft_config")
        model = adapt(model, peft_config, args.seed, args.lora_experts == "shared")
    elif weights_of(model) != "bf16":
        raise QeRLError(
            f"The model has {weights_of(model)} weights, which cannot be trained themselves; pass "
            "peft_config, or a model that `add_lora` has given an adapter."
        )
    check_dtype(model)
    _agree_with_model(args, acted_on, model)
    for name, value in held(model).items():
        if name not in acted_on:
            setattr(args, name, value)
    args.follow_tuning()
    return model


def _agree_with_model(args: QeRLConfig, acted_on: Collection[str], model: nn.Module) -> None:
    """Raise if a setting that describes the model disagrees with the model that was passed in."""
    own, given = held(model), _set_fields(args, acted_on)
    for name in sorted(given & own.keys()):
        if plain(getattr(args, name)) != own[name]:
            raise QeRLError(
                f"{name} is {getattr(args, name)!r} and the model that was handed in has {own[name]!r}; set "
                "it to that, or remove it."
            )
    for name in sorted(given & LORA_FIELDS.keys() - own.keys()):
        raise QeRLError(f"{name} is set and the model that was handed in has no LoRA adapter; remove it.")


# Tokenizer and engine


def _tokenizer(
    given: Any, model: Any, train_dataset: Any, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was passed in, else the model's."""
    template = getattr(given, "chat_template", None)
    if isinstance(given, ProcessorMixin):
        given = given.tokenizer
    if given is not None and not isinstance(given, PreTrainedTokenizerBase):
        raise QeRLError(f"processing_class is a {type(given).__name__}; pass a tokenizer of transformers.")
    chat = is_conversational(next(iter(train_dataset), {}))
    if given is None:
        name = model if isinstance(model, LocalModel) else base_model(model).name_or_path
        if not str(name):
            raise QeRLError("The model has no name to load a tokenizer by; pass it as processing_class.")
        given = load_tokenizer(name, chat, trust_remote_code)
    elif chat and template is None:
        raise QeRLError(
            "The prompts are chat messages and processing_class has no chat template; set its chat_template, "
            "or make each prompt a text."
        )
    if given.pad_token is None:
        given.pad_token = given.eos_token
    return given


def _engine(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, args: QeRLConfig
) -> RolloutEngine:
    """Move the model to the training device and return the fastest engine for it."""
    if base_model(model).device != args.device:
        model.to(args.device)
    return make_engine(model, tokenizer.pad_token_id, args.max_sequences, args.kv_cache_dtype)
