"""Tools and environments as a user hands them to the trainer: checked, and given to TRL.

TRL takes functions as tools and environments whose methods are tools. Text environments, which answer what
the model wrote, TRL does not know: it would take `respond` for a tool and want a template for it. They are
put into TRL's pool of environments once its constructor is through, and from there on TRL resets them, hands
them to the rewards and renders their prompts as those of any environment.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import is_conversational

from qerl.agents.environment import (
    EnvironmentFactory,
    begin_episode,
    check_environment,
    check_names,
    is_text,
)
from qerl.agents.template import check_template
from qerl.agents.tools import Tool, check_tool
from qerl.errors import QeRLError
from qerl.tasks.guard import guarded
from qerl.tasks.together import Together

Named = dict[str | None, EnvironmentFactory]
"""Factories by the name in the column `environment`; None names the only one."""


@dataclass(frozen=True)
class Others:
    """Who answers the policy; nobody by default.

    Attributes:
        tools: Functions that the model may call.
        factories: Of environments.
        several: Whether a column `environment` chooses among them.
        texts: Whether they answer texts; otherwise their methods are tools.
        rewards: Reward functions of text environments that score their episodes.
        own_rewards: Whether an environment scores its episodes.
        rollout_func: Samples in the engine's place.
    """

    tools: list[Tool] = field(default_factory=list)
    factories: Named = field(default_factory=dict)
    several: bool = False
    texts: bool = False
    rewards: list[Callable[..., Any]] = field(default_factory=list)
    own_rewards: bool = False
    rollout_func: Callable[..., Any] | None = None

    def __bool__(self) -> bool:
        """Whether there is anybody."""
        return bool(self.tools or self.factories or self.rollout_func)

    @property
    def for_trl(self) -> dict[str, Any]:
        """Arguments of TRL's constructor."""
        theirs: Any = None
        if self.factories and not self.texts:
            theirs = self.factories if self.several else self.factories[None]
        return {
            "tools": self.tools or None,
            "environment_factory": theirs,
            "rollout_func": self.rollout_func,
        }

    def rows(self, dataset: Any, args: GRPOConfig) -> Any:
        """The data set; where an environment has the data, rows with empty prompts for it to fill.

        Raises:
            QeRLError: There is none and no single environment to have the data, the length of the run is not
                known without one, its prompts are no messages, or a row names no environment that there is.
        """
        if dataset is None and self.factories:
            if self.several:
                raise QeRLError(
                    "Several environments need a train_dataset, whose column `environment` names one for "
                    "each row."
                )
            if args.max_steps <= 0:
                raise QeRLError(
                    "Without a train_dataset the environment has the data, and nothing says how long the run "
                    "is; set max_steps."
                )
            prompts = [[{"role": "user", "content": ""}]] * (
                (args.generation_batch_size or 0) // (args.num_generations or 1)
            )
            return Dataset.from_dict({"prompt": prompts})
        first: Mapping[str, Any] = next(iter(dataset if dataset is not None else ()), {})
        if self.several and dataset is not None:
            whole = isinstance(dataset, Dataset) and "environment" in dataset.column_names
            for name in dataset.unique("environment") if whole else [first.get("environment")]:
                if name not in self.factories:
                    raise QeRLError(
                        f"A row of the train_dataset has the environment {name!r}; its column `environment` "
                        f"must name one of: {', '.join(map(str, self.factories))}."
                    )
        if (self.tools or self.factories) and "prompt" in first and not is_conversational(first):
            raise QeRLError(
                "Tools and environments need prompts of messages and the data set has texts; make each "
                'prompt a list such as [{"role": "user", "content": ...}].'
            )
        return dataset

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a model that cannot take part in the conversation.

        Raises:
            QeRLError: There are tools and its chat template has none, or it has no chat template.
        """
        if self.tools or (self.factories and not self.texts):  # TRL asks for it without any tool too
            check_template(tokenizer)
        elif self.texts and tokenizer.chat_template is None:
            raise QeRLError(
                "An environment needs a chat template, which the model lacks; put a chat_template.jinja "
                "beside it."
            )

    def join(self, trainer: GRPOTrainer, reward_timeout: float, calls: Together) -> None:
        """Finish what TRL's constructor has made of tools and environments.

        Text environments get into its pool, and rewards of environments are guarded like other functions.

        Args:
            trainer: TRL's constructor is through.
            reward_timeout: Seconds that an environment may take to score an episode.
            calls: Where its tools and asynchronous rewards wait, on one event loop.
        """
        if self.texts:
            trainer.environment_factories = self.factories
            trainer._multi_environment = self.several
            trainer._env_tools = {name: [] for name in self.factories}
            trainer._environment_pool = {name: [make()] for name, make in self.factories.items()}
            # TRL asks this whether there is more than one turn.
            trainer.tools = [pool[0].respond for pool in trainer._environment_pool.values()]
        if self.rewards and trainer.args.reward_weights is not None:
            # TRL's constructor wanted one for each function; what is saved is what the user gave.
            trainer.args.reward_weights = trainer.args.reward_weights[: -len(self.rewards)]
        for index, (reward, name) in enumerate(
            zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        ):
            own = getattr(reward, "__name__", "") == "get_reward"
            if own and not isinstance(reward, torch.nn.Module):
                reward.__name__ = name
                trainer.reward_funcs[index] = guarded(reward, reward_timeout, calls)


def check_others(tools: Any, environment_factory: Any, rollout_func: Any) -> Others:
    """What the user hands in, checked; environments are made once for trial, and that one is used.

    Args:
        tools, environment_factory, rollout_func: As in `qerl.trainer.grpo.QeRLTrainer`.

    Raises:
        QeRLError: One of them is not what it should be, or two of them contradict each other.
    """
    if rollout_func is not None:
        if not callable(rollout_func):
            raise QeRLError(f"rollout_func is a {type(rollout_func).__name__}; pass a function.")
        if tools or environment_factory:
            raise QeRLError(
                "rollout_func samples by itself, so nobody would call tools or environments; pass one of "
                "them."
            )
        return Others(rollout_func=rollout_func)
    functions = [check_tool(tool) for tool in ([tools] if callable(tools) else tools or [])]
    several = isinstance(environment_factory, Mapping)
    given: Named = {}
    if environment_factory is not None:
        given = dict(environment_factory) if several else {None: environment_factory}
    if not all(map(callable, given.values())) or (several and not given):
        raise QeRLError("environment_factory is not callable; pass a class, a function, or several by name.")
    trials = {name: check_environment(make) for name, make in given.items()}
    texts = any(map(is_text, trials.values()))
    if texts and (functions or not all(map(is_text, trials.values()))):
        raise QeRLError(
            "An environment with respond(text) has no tools, and there are tools beside it; give the tools "
            "to an environment without respond, or leave them out."
        )
    check_names(functions, trials.values())
    # In the order in which they are given, which is the same in every process.
    owners = dict.fromkeys(type(trial) for trial in trials.values() if hasattr(trial, "get_reward"))
    return Others(
        tools=functions,
        factories={name: _handing_out(trials[name], make) for name, make in given.items()},
        several=several,
        texts=texts,
        rewards=[_episode_reward(owner) for owner in owners] if texts else [],
        own_rewards=bool(owners),
    )


def _handing_out(trial: Any, make: EnvironmentFactory) -> EnvironmentFactory:
    """The factory, which hands out first what it made for trial; `reset` fails in a sentence."""

    def made() -> Iterator[Any]:
        yield trial
        while True:
            yield make()

    environments = made()

    def hand_out() -> Any:
        environment = next(environments)
        try:
            environment.reset = _checked_reset(environment)
        except AttributeError as error:
            raise QeRLError(
                f"The environment {type(environment).__name__} has __slots__ and takes no attribute; add "
                '"__dict__" to them, or remove them.'
            ) from error
        return environment

    return hand_out


def _checked_reset(environment: Any) -> Callable[..., Any]:
    name, reset = type(environment).__name__, environment.reset

    def checked(**row: Any) -> str | None:
        return begin_episode(name, reset, row)

    return checked


def _episode_reward(owner: Any) -> Callable[..., Any]:
    """What environments of this class score their episodes with; none for others."""

    async def awaited(environments: list[Any], **_: Any) -> list[float | None]:
        return [await each.get_reward() if type(each) is owner else None for each in environments]

    def at_once(environments: list[Any], **_: Any) -> list[float | None]:
        return [each.get_reward() if type(each) is owner else None for each in environments]

    score: Callable[..., Any] = awaited if iscoroutinefunction(owner.get_reward) else at_once
    score.__name__ = owner.__name__
    return score
