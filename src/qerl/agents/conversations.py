"""Conversations of the policy with tools and environments, from the rows of a data set to trajectories.

Training and evaluation both sample through this module, so that rows reach environments, and answers become
tokens, in one way. Environments are made when more of them are needed at a time than exist, reset for each
conversation, and kept for later ones; an environment in which a tool call still runs is replaced.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from qerl.agents.environment import (
    EnvironmentFactory,
    begin_episode,
    check_environment,
    check_names,
    is_endpoint,
    is_text,
    takes_turns,
)
from qerl.agents.loop import Limits, Trajectories, run_trajectories
from qerl.agents.play import Endpoints
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.thinking import thinking_of
from qerl.agents.tools import Tool, check_tool
from qerl.agents.trajectory import Message, Trajectory
from qerl.agents.world import SilentWorld, ToolWorld, World, world_of
from qerl.errors import QeRLError
from qerl.rollout.engine import NormOffsets, RolloutEngine, SamplingParams, Session

Named = dict[str | None, EnvironmentFactory]
"""Environment factories by the name in a row's column `environment`; the key of an only factory is None."""

NO_PROMPT: list[Message] = [{"role": "user", "content": ""}]
"""The prompt of a row that has none, to which its environment adds."""


@dataclass(frozen=True)
class Others:
    """The tools and environments that answer the policy, checked; none by default.

    Attributes:
        tools: Functions that the model may call.
        factories: Environment factories.
        first: One environment of each factory, made on trial.
    """

    tools: list[Tool] = field(default_factory=list)
    factories: Named = field(default_factory=dict)
    first: dict[str | None, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self.tools or self.factories)

    @property
    def several(self) -> bool:
        """True if a column `environment` chooses among environments."""
        return bool(self.factories) and None not in self.factories

    @property
    def texts(self) -> bool:
        """True if environments answer texts; otherwise their methods are tools."""
        return any(map(is_text, self.first.values()))

    @property
    def endpoints(self) -> bool:
        """True if external agents drive the conversations."""
        return any(map(is_endpoint, self.first.values()))

    @property
    def take_turns(self) -> bool:
        """True if the policy is answered; an environment without tools only adds to the prompt."""
        return bool(self.tools) or any(map(takes_turns, self.first.values()))

    @property
    def judges(self) -> list[type]:
        """Environment classes that score their episodes (``get_reward``), in the order given."""
        return [*dict.fromkeys(type(each) for each in self.first.values() if hasattr(each, "get_reward"))]


def check_others(tools: Any, environment_factory: Any) -> Others:
    """Check the tools and environments of a user; one environment of each factory is made on trial.

    Args:
        tools: A function, or several; None for none.
        environment_factory: A factory, or several by name in a dictionary; None for none.

    Raises:
        QeRLError: A tool or environment is invalid, or two of them conflict.
    """
    functions = [check_tool(tool) for tool in ([tools] if callable(tools) else tools or [])]
    several = isinstance(environment_factory, Mapping)
    given: Named = {}
    if environment_factory is not None:
        given = dict(environment_factory) if several else {None: environment_factory}
    if not all(map(callable, given.values())) or (several and not given):
        raise QeRLError("environment_factory is not callable; pass a class, a function, or several by name.")
    others = Others(functions, given, {name: check_environment(make) for name, make in given.items()})
    if others.texts and (functions or not all(map(is_text, others.first.values()))):
        raise QeRLError(
            "An environment with respond(text) cannot be combined with tools; use them with an environment "
            "without respond, or leave them out."
        )
    if others.endpoints and (functions or not all(map(is_endpoint, others.first.values()))):
        raise QeRLError(
            "An agent behind the endpoint brings its own tools and environment, and cannot be combined with "
            "others; leave those out."
        )
    check_names(functions, others.first.values())
    return others


class Conversations:
    """The conversations of one policy; a context manager that closes calls and environments at its end.

    Args:
        tokenizer: The policy's tokenizer; has a chat template if there are others.
        template_kwargs: The template's own arguments.
        others: Tools and environments; empty if there is only a thinking budget.
        pool: Makes the calls.
        limits: Limits of a conversation besides its number of tokens.

    Attributes:
        has_others, take_turns, endpoints: See `Others`.
        environments: Environments of the rows that were opened last; None if there are none.

    Raises:
        QeRLError: The model's template does not support tools, or cannot continue a conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None,
        others: Others,
        pool: ToolPool,
        limits: Limits,
    ) -> None:
        self._tokenizer, self._others, self._pool, self._limits = tokenizer, others, pool, limits
        self._template = None
        if others and not others.endpoints:
            self._template = TurnTemplate(tokenizer, template_kwargs, tools=not others.texts)
        self._endpoints = Endpoints(tokenizer, template_kwargs, pool.beside)  # listens from its first use on
        self._made = {name: [first] for name, first in others.first.items()}
        self._idle: dict[str | None, list[Any]] = {}  # of `_made`, those that no running conversation uses
        self._worlds: list[World] = []  # of the rows opened last
        self._open: list[World] = []  # and of rows opened before them, with `beside`
        self.has_others, self.take_turns = bool(others), others.take_turns
        self.endpoints = others.endpoints
        self.environments: list[Any] | None = None

    def __enter__(self) -> "Conversations":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.closing(self._pool), contextlib.closing(self._endpoints):
            for environment in (each for made in self._made.values() for each in made):
                if is_text(environment) and callable(close := getattr(environment, "close", None)):
                    close()

    def open(self, rows: Sequence[Mapping[str, Any]], beside: bool = False) -> list[list[Message]]:
        """Begin an episode per row, and return each row's prompt with its environment's observation.

        Args:
            rows: One per conversation.
            beside: Whether conversations that were opened before continue, until `close`.

        Raises:
            QeRLError: An environment cannot begin, or a row has neither a prompt nor an observation.
        """
        if not beside:
            self._idle = {name: list(made) for name, made in self._made.items()}
            self._open = []
        self._worlds, prompts, environments = [], list[list[Message]](), list[Any]()
        for row in rows:
            messages = [dict(message) for message in row.get("prompt") or NO_PROMPT]
            environment = self._environment(row) if self._others.factories else None
            if environment is not None:
                hidden = {"environment"} if self._others.several else set[str]()
                told = {name: value for name, value in row.items() if name not in hidden}
                shown = begin_episode(type(environment).__name__, environment.reset, told)
                messages[-1]["content"] = (messages[-1].get("content") or "") + (shown or "")
                if not messages[-1]["content"] and not self.endpoints:
                    raise QeRLError(
                        f"reset of the environment {type(environment).__name__} returned no observation, and "
                        "the data have no prompt; return a text that says what to do."
                    )
            prompts.append(messages)
            environments.append(environment)
            self._worlds.append(self._world(environment))
        self._open += self._worlds
        self.environments = environments if self._others.factories else None
        return prompts

    def close(self, environments: Sequence[Any]) -> None:
        """Release environments for reuse, except those in which a call still runs."""
        closed = {id(each) for each in environments} - self._hanging
        for name, made in self._made.items():
            self._idle[name] += [each for each in made if id(each) in closed]

    def _environment(self, row: Mapping[str, Any]) -> Any:
        name = row.get("environment") if self._others.several else None
        if name not in self._others.factories:
            raise QeRLError(
                f"A row has the environment {name!r}; its column `environment` must name one of: "
                f"{', '.join(map(str, self._others.factories))}."
            )
        if self._idle[name]:
            return self._idle[name].pop(0)
        made = self._others.factories[name]()
        self._made[name].append(made)
        return made

    def _world(self, environment: Any) -> World:
        if self._template is None or not self._others.take_turns:  # without answers, a tool call is text
            return SilentWorld(self._tokenizer)
        return world_of(self._template, self._others.tools, environment)

    def prompt_ids(self, prompts: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Tokenize the prompts of the rows that were opened last, each with its own tools."""
        assert self._template is not None, "prompts without others are rendered by their owner"
        tools = [world.tools if isinstance(world, ToolWorld) else () for world in self._worlds]
        return [self._template.prompt_ids(*pair) for pair in zip(prompts, tools, strict=True)]

    def play(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        norm_offsets: NormOffsets | None,
        seeds: Sequence[int],
        fixed: bool,
    ) -> list[Trajectory]:
        """Run the agents of the rows that were opened last; see `Endpoints.play`."""
        assert self.environments is not None, "rows were opened"
        return self._endpoints.play(engine, params, norm_offsets, self.environments, seeds, fixed)

    def sample(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        norm_offsets: NormOffsets | None,
        prompt_ids: Sequence[Sequence[int]],
        samples: int,
        seeds: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """Sample one trajectory per conversation, the samples of a prompt next to each other.

        Args:
            engine: Samples from the policy.
            params, norm_offsets: Arguments of the session; a thinking budget is among the stops.
            prompt_ids: Token ids of each prompt.
            samples: Number of conversations per prompt.
            seeds: One per conversation; None derives them from ``params``, the prompt and the sample.
        """
        worlds, limits = self.worlds(len(prompt_ids) * samples), self._limits_for(params)
        with engine.session(params, norm_offsets) as session:
            found = run_trajectories(session, prompt_ids, samples, worlds, self._pool, limits, seeds)
        self._replace_hanging()
        return found

    @contextlib.contextmanager
    def going_on(self, session: Session, params: SamplingParams) -> Iterator[Trajectories]:
        """Sample conversations in an open session, within a ``with`` block; rows bring their `worlds`.

        Args:
            session: A session of the engine; nothing else is started in it.
            params: Sampling parameters of the session.
        """
        try:
            yield Trajectories(session, self._pool, self._limits_for(params))
        finally:
            self._pool.abandon()
        self._replace_hanging()

    def worlds(self, count: int) -> Sequence[World]:
        """Return the worlds of the rows that were opened last; without others, ``count`` silent worlds."""
        return self._worlds if self._others else [SilentWorld(self._tokenizer) for _ in range(count)]

    def _limits_for(self, params: SamplingParams) -> Limits:
        thinking = thinking_of(params.stops)
        texts_end_turns = any(stop is not thinking for stop in params.stops)
        return replace(self._limits, texts_end_turns=texts_end_turns, thinking=thinking)

    @property
    def _hanging(self) -> set[int]:
        """Ids (`id`) of the environments in which a call still runs."""
        return {id(world.environment) for world in self._open if world.hangs}

    def _replace_hanging(self) -> None:
        hanging = self._hanging
        for name, made in self._made.items():
            make = self._others.factories[name]
            made[:] = [make() if id(environment) in hanging else environment for environment in made]


def rows_for(others: Others, dataset: Any, rows: int, max_steps: int) -> Any:
    """Return the data set or, if an environment has the data, rows with empty prompts for it to fill.

    Args:
        others: Tools and environments.
        dataset: The user's data set, or None.
        rows: Number of rows in one rollout.
        max_steps: Length of the run in steps; 0 or less if not set.

    Raises:
        QeRLError: There is no data set, and several environments or no ``max_steps``; or the prompts are not
            messages, or a row names an unknown environment.
    """
    if dataset is None and others.factories:
        if others.several:
            raise QeRLError(
                "Several environments need a train_dataset, whose column `environment` names one for each "
                "row."
            )
        if max_steps <= 0:
            raise QeRLError(
                "Without a train_dataset the environment provides the data, and the length of the run is "
                "unknown; set max_steps."
            )
        return Dataset.from_dict({"prompt": [NO_PROMPT] * rows})
    first: Mapping[str, Any] = next(iter(dataset if dataset is not None else ()), {})
    if others.several and dataset is not None:
        whole = isinstance(dataset, Dataset) and "environment" in dataset.column_names
        for name in dataset.unique("environment") if whole else [first.get("environment")]:
            if name not in others.factories:
                raise QeRLError(
                    f"A row of the train_dataset has the environment {name!r}; its column `environment` must "
                    f"name one of: {', '.join(map(str, others.factories))}."
                )
    if others and isinstance(first.get("prompt"), str):
        raise QeRLError(
            "Tools and environments need prompts that are lists of messages, but the data set has texts; "
            'make each prompt a list such as [{"role": "user", "content": ...}].'
        )
    return dataset
