"""What a run refuses for its settings alone, found before anything is downloaded or loaded.

`qerl train --dry_run` stops after this. Types, ranges and contradictions are checked when settings are
made; here come the things that have to be tried: the task and its options, the user's reward files, the
reporters' packages, the optimizer and the learning-rate schedule with the user's own arguments.
"""

from typing import Any

import torch
from transformers import Trainer, get_scheduler
from transformers.integrations.integration_utils import get_available_reporting_integrations

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.tasks import get_task
from qerl.tasks.base import RewardFunction, Task
from qerl.tasks.custom import load_reward
from qerl.tasks.jsonl import Jsonl
from qerl.trainer.rewards import with_length_penalty


def preflight(config: QeRLConfig) -> tuple[Task, list[RewardFunction]]:
    """The task and its reward functions, the user's among them, without any data.

    Raises:
        QeRLError: The run would be refused for its settings.
    """
    assert config.task is not None
    task = get_task(config.task, **config.task_options)
    if isinstance(task, Jsonl):  # a file of this machine
        task.train()
    rewards = [*task.rewards, *(load_reward(spec) for spec in config.reward_files)]
    _check_weights(config, rewards)
    _check_reporters(config)
    _check_optimizer(config)
    return task, rewards


def _check_weights(config: QeRLConfig, rewards: list[RewardFunction]) -> None:
    names = [getattr(reward, "__name__", "?") for reward in with_length_penalty(rewards, config)]
    weights = config.reward_weights
    if weights is not None and len(weights) != len(names):
        raise QeRLError(
            f"reward_weights has {len(weights)} numbers for {len(names)} reward functions: "
            f"{', '.join(names)}."
        )


def _check_reporters(config: QeRLConfig) -> None:
    missing = set(config.report_to or ()) - set(get_available_reporting_integrations())
    if missing:
        names = ", ".join(sorted(missing))
        raise QeRLError(
            f"report_to names {names}, which is not installed; install it or set report_to: none."
        )


def _check_optimizer(config: QeRLConfig) -> None:
    """Makes the optimizer and its schedule for one number."""
    try:
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **kwargs)
    except Exception as error:  # whatever the library raises, it was given nothing but the settings
        raise QeRLError(
            f"The optimizer {_name(config.optim)} cannot be made from optim and optim_args: {_line(error)}."
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
            f"The schedule {_name(config.lr_scheduler_type)} cannot be made from lr_scheduler_type and "
            f"lr_scheduler_kwargs: {_line(error)}."
        ) from error


def _name(member: Any) -> str:
    return getattr(member, "value", member)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
