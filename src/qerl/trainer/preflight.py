"""Checks of a run's settings that come before anything is downloaded or loaded.

`qerl train --dry_run` stops after this. Types, ranges and contradictions are checked when settings are made;
this module checks what has to be tried or looked up: the task and its options, the user's reward files,
tools and environment, the reporters' packages, the optimizer and the learning-rate schedule with the user's
own arguments, the requirements of weight and KV cache formats on this machine, a model given as a path, and
the length of the run if the task's problems are on this machine. Checks that need the Hub or the model come
when the run starts.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, get_scheduler
from transformers.integrations.integration_utils import get_available_reporting_integrations

from qerl.agents.conversations import Others, check_others
from qerl.agents.environment import EnvironmentFactory
from qerl.agents.tools import Tool
from qerl.environments.registry import get_environment, get_tool
from qerl.errors import QeRLError, first_line
from qerl.kernels import needs
from qerl.lora.adapter import adapter_file
from qerl.models.load import check_format
from qerl.rewards.judge import make_judge
from qerl.rollout.select import no_paged_engine
from qerl.settings.config import QeRLConfig
from qerl.settings.groups import TEACHER_ADAPTER
from qerl.tasks import get_task
from qerl.tasks.base import RewardFunction, Task
from qerl.trainer.data import check_enough
from qerl.trainer.rewards import with_length_penalty
from qerl.trainer.teacher import check_teacher_prompt
from qerl.update.kernels import check_fp8_gradients
from qerl.user_code import load_object
from qerl.weight_formats import DEFAULT_FORMAT


@dataclass(frozen=True)
class Parts:
    """The parts of a run besides its model.

    Attributes:
        task: The task of the run.
        rewards: Reward functions of the task and of the user, then the judge, if any.
        tools: Functions that the model may call.
        environment_factory: Makes the environment; None without one.
    """

    task: Task
    rewards: list[RewardFunction]
    tools: list[Tool]
    environment_factory: EnvironmentFactory | None


def preflight(config: QeRLConfig) -> Parts:
    """Check the settings and return the parts of the run; nothing is downloaded.

    Raises:
        QeRLError: The settings are refused.
    """
    assert config.task is not None
    task = get_task(config.task, **config.task_options)
    if config.algorithm == "sft":
        if not task.on_hub:
            task.demonstrations()
    elif not task.on_hub:
        rows = task.epoch(task.train())
        check_length(config, len(rows))
        if config.teacher_prompt is not None:
            check_teacher_prompt(config.teacher_prompt, rows.column_names)
    rewards = [*task.rewards, *(load_object(spec, "reward") for spec in config.reward_files)]
    if config.judge:
        rewards.append(make_judge(config.judge))
    others = _others(config)
    _check_weights(config, rewards)
    _check_reporters(config)
    _check_optimizer(config)
    _check_machine(config)
    return Parts(task, rewards, others.tools, others.factories.get(None))


def check_length(config: QeRLConfig, prompts: int) -> None:
    """Raise if a run has too few prompts for a rollout, or too few steps for the stages of the noise.

    Args:
        config: Settings of the run.
        prompts: Number of training problems, or an upper bound of it.

    Raises:
        QeRLError: The run is too short.
    """
    check_enough(config, prompts, f"the task {config.task}")
    if config.noise:
        config.noise_schedule_of(optimizer_steps(config, prompts))


def optimizer_steps(config: QeRLConfig, prompts: int) -> int:
    """Return the number of optimizer steps for ``prompts`` training problems, as transformers counts them."""
    if config.max_steps > 0:
        return config.max_steps
    rollout = (config.generation_batch_size or 1) // (config.num_generations or 1)
    microbatches = prompts // rollout * config.num_iterations * (config.steps_per_generation or 1)
    per_epoch = max(1, math.ceil(microbatches / config.gradient_accumulation_steps))
    return math.ceil(config.num_train_epochs * per_epoch)


def _others(config: QeRLConfig) -> Others:
    """Make the tools and an environment of the settings once, to check them."""
    tools = [get_tool(spec) for spec in config.tools]
    if config.environment is not None:
        make = get_environment(config.environment, config.environment_options)
        return check_others(tools, make)
    if config.environment_options:
        raise QeRLError("environment_options is set, and there is no environment; set one, or remove it.")
    return check_others(tools, None)


def _check_machine(config: QeRLConfig) -> None:
    check_format(config.weights or DEFAULT_FORMAT, config.device)
    if config.kv_cache_dtype != "auto":
        on_gpu = config.device.type == "cuda"
        found = needs.obstacles(fp8=True) if on_gpu else [needs.NO_CUDA]
        if found:
            reasons = ", ".join(obstacle.reason for obstacle in found)
            raise no_paged_engine(config.kv_cache_dtype, reasons)
    if config.backward_dtype == "fp8":
        check_fp8_gradients(config.device)
    teacher = config.teacher or ""
    if teacher.startswith(TEACHER_ADAPTER):
        adapter_file(Path(teacher.removeprefix(TEACHER_ADAPTER)).expanduser())  # raises without one
    if config.teacher_weights is not None:
        check_format(config.teacher_weights, config.device)
    for what, name in {"model": str(config.model), "teacher": teacher}.items():
        if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().exists():
            raise QeRLError(f"The {what} {name} is a path that does not exist; check it, or name a Hub id.")


def _check_weights(config: QeRLConfig, rewards: list[RewardFunction]) -> None:
    names = [getattr(reward, "__name__", "?") for reward in with_length_penalty(rewards, config)]
    weights = config.reward_weights
    if weights is not None and len(weights) != len(names):
        raise QeRLError(
            f"reward_weights has {len(weights)} numbers for {len(names)} reward functions: "
            f"{', '.join(names)}; give one number for each."
        )


def _check_reporters(config: QeRLConfig) -> None:
    missing = sorted(set(config.report_to or ()) - set(get_available_reporting_integrations()))
    if missing:
        raise QeRLError(
            f"report_to names {', '.join(missing)}, which is not installed; run `pip install "
            f"{' '.join(missing)}`, or set report_to: none."
        )


def _check_optimizer(config: QeRLConfig) -> None:
    """Raise if the optimizer or its schedule cannot be made; tried with a single parameter."""
    try:
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **kwargs)
    except Exception as error:  # any error of the library is due to the settings, its only input
        raise QeRLError(
            f"The optimizer {_name(config.optim)} cannot be made ({first_line(error)}); mend optim or "
            "optim_args."
        ) from error
    steps = max(config.max_steps, 1)
    try:
        get_scheduler(
            config.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=config.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=config.lr_scheduler_kwargs,
        )
    except Exception as error:  # as above
        raise QeRLError(
            f"The schedule {_name(config.lr_scheduler_type)} cannot be made ({first_line(error)}); mend "
            "lr_scheduler_type or lr_scheduler_kwargs."
        ) from error


def _name(member: Any) -> str:
    return getattr(member, "value", member)
