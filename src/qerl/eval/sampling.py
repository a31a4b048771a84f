"""How an evaluation gets its completions: one turn of the policy, or a conversation with tools.

Both give the same, so that what is judged and kept does not depend on it. Tools and environments stand for an
evaluation as they do for training (`qerl.agents`): a problem's environment is told its row, and what it
answers becomes tokens by the chat template.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from qerl.agents.environment import begin_episode, check_environment, check_names, is_text, takes_turns
from qerl.agents.loop import Limits, ToolErrors, run_trajectories
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.thinking import thinking_of
from qerl.agents.trajectory import Message, ThoughtsClosed, Trajectory
from qerl.agents.world import SilentWorld, ToolWorld, World, world_of
from qerl.environments.registry import get_environment, get_tool
from qerl.errors import QeRLError
from qerl.rollout.engine import RolloutEngine, SamplingParams

_CONVERSATIONS = 1024
"""Conversations of a call at most: each may have an environment of its own."""


@dataclass(frozen=True)
class Said:
    """A completion as it is judged.

    Attributes:
        text: What the policy said, or of a conversation its messages, those of others among them.
        tokens: Number that the policy drew.
        end: Why it ended: a `FinishReason`, or an `EndReason` of a trajectory.
        thoughts: Who closed thoughts in it, where there is a budget of thinking; None for nobody.
    """

    text: str | list[Message]
    tokens: int
    end: str
    thoughts: ThoughtsClosed | None = None


def in_one_turn(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    samples: int,
    params: SamplingParams,
    seeds: Sequence[int] | None = None,
) -> list[Said]:
    """What the policy says to each prompt in one turn, in which its thoughts may be closed.

    Args:
        engine: Samples from the policy.
        tokenizer: Of the policy.
        prompts: Token ids of each.
        samples: Completions of each.
        params: How they are sampled; a budget of thinking is among the stops.
        seeds: By which each completion is drawn; None draws them by ``params`` and their places.
    """
    thinking = thinking_of(params.stops)
    if thinking is None:
        found = engine.generate(prompts, samples, params, seeds=seeds).completions
        texts = tokenizer.batch_decode([c.token_ids for c in found], skip_special_tokens=True)
        return [Said(text, len(c.token_ids), c.finish_reason) for text, c in zip(texts, found, strict=True)]
    worlds = [SilentWorld(tokenizer) for _ in range(len(prompts) * samples)]
    pool = ToolPool(1.0, 1)  # nothing is called
    with contextlib.closing(pool), engine.session(params) as session:
        ended = run_trajectories(session, prompts, samples, worlds, pool, Limits(thinking=thinking), seeds)
    texts = tokenizer.batch_decode([t.token_ids for t in ended], skip_special_tokens=True)
    return [_said(text, trajectory) for text, trajectory in zip(texts, ended, strict=True)]


def _said(text: str | list[Message], trajectory: Trajectory) -> Said:
    return Said(text, sum(trajectory.written), trajectory.end or "stop", trajectory.thoughts)


class Conversations:
    """Conversations of the policy with tools or environments; a context, at whose end calls are given up.

    Args:
        engine: Samples from the policy.
        tokenizer: With a chat template.
        template_kwargs: Its arguments.
        tools: Functions that the model may call, by their names in a recipe.
        environment: Who answers the model, by its name in a recipe; None where there are tools alone.
        environment_options: Its keyword arguments.
        max_tool_calling_iterations: Turns that are answered; None for as many as the tokens allow.
        tool_timeout: Seconds that a call may take.
        tool_errors: Whether an error is told or ends the conversation.
        tool_output_limit: Characters of an answer.

    Attributes:
        rows_per_call: As of the engine; fewer, since each conversation may have an environment of its own.

    Raises:
        QeRLError: A tool or the environment cannot be made, or the model's template has no tools.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any],
        *,
        tools: Sequence[str],
        environment: str | None,
        environment_options: dict[str, Any],
        max_tool_calling_iterations: int | None,
        tool_timeout: float,
        tool_errors: ToolErrors,
        tool_output_limit: int,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.rows_per_call = min(_CONVERSATIONS, engine.rows_per_call)
        self._limits = Limits(max_tool_calling_iterations, tool_errors)
        self._tools = [get_tool(spec) for spec in tools]
        self._make = None
        self._environments: list[Any] = []  # one for each conversation at a time, reset for the next one
        if environment is not None:
            self._make = get_environment(environment, environment_options)
            self._environments.append(check_environment(self._make))
        check_names(self._tools, self._environments)
        texts = any(map(is_text, self._environments))
        if texts and self._tools:
            raise QeRLError(
                f"The environment {environment} answers texts and has no tools, and there are tools "
                "beside it; leave one of them out."
            )
        self._one_turn = not self._tools and not any(map(takes_turns, self._environments))
        self._template = TurnTemplate(tokenizer, template_kwargs, tools=not texts)
        self._pool = ToolPool(tool_timeout, tool_output_limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of what environments hold, such as a connection, and of the calls."""
        with contextlib.closing(self._pool):
            for environment in self._environments:
                if is_text(environment) and callable(close := getattr(environment, "close", None)):
                    close()

    def sample(
        self, rows: Sequence[dict[str, Any]], samples: int, params: SamplingParams, seeds: Sequence[int]
    ) -> list[Said]:
        """What comes of some problems, the samples of a problem next to each other.

        Args:
            rows: The problems.
            samples: Conversations of each.
            params: How the policy is sampled.
            seeds: By which each conversation is drawn, in the place of that of ``params``.
        """
        worlds: list[World] = []
        prompts: list[list[int]] = []
        for row in rows:
            for _ in range(samples):
                world, messages = self._begin(row, len(worlds))
                tools = world.tools if isinstance(world, ToolWorld) else ()
                worlds.append(world)
                prompts.append(self._template.prompt_ids(messages, tools))
        once = prompts[::samples]
        if prompts != [prompt for prompt in once for _ in range(samples)]:  # each sample was shown its own
            once, samples = prompts, 1
        thinking = thinking_of(params.stops)
        texts_end_turns = any(stop is not thinking for stop in params.stops)
        limits = replace(self._limits, texts_end_turns=texts_end_turns, thinking=thinking)
        with self._engine.session(params) as session:
            found = run_trajectories(session, once, samples, worlds, self._pool, limits, seeds)
        if self._make is not None:
            for number, world in enumerate(worlds):
                if world.hangs:
                    self._environments[number] = self._make()
        return [_said(trajectory.messages, trajectory) for trajectory in found]

    def _begin(self, row: dict[str, Any], number: int) -> tuple[World, list[Message]]:
        """The other side of a conversation, by its number in the call, and the prompt with what it says
        first."""
        environment = None
        if self._make is not None:
            if number == len(self._environments):
                self._environments.append(self._make())
            environment = self._environments[number]
        messages = [dict(message) for message in row["prompt"]]
        if environment is not None:
            observation = begin_episode(type(environment).__name__, environment.reset, row)
            if observation:
                messages[-1]["content"] += observation
        if self._one_turn:  # as in training, where a call that nobody would answer is text
            return SilentWorld(self._tokenizer), messages
        return world_of(self._template, self._tools, environment), messages
