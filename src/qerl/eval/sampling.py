"""Completions of an evaluation: one turn of the policy, or a conversation with tools and an environment.

Both are returned as `Said`, so judging and storing them is the same. Tools and environments work in an
evaluation as they do in training (`qerl.agents.conversations`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.agents.conversations import Conversations, Others, check_others
from qerl.agents.loop import Limits, ToolErrors
from qerl.agents.pool import ToolPool
from qerl.agents.thinking import thinking_of
from qerl.agents.trajectory import Message, ThoughtsClosed, Trajectory
from qerl.environments.registry import get_environment, get_tool
from qerl.rollout.engine import RolloutEngine, SamplingParams, WhenEnded

MAX_CONVERSATIONS = 1024
"""Maximum number of conversations per call, because each may have its own environment."""


@dataclass(frozen=True)
class Said:
    """A completion in the form in which it is judged.

    Attributes:
        text: The completion's text, or all messages of a conversation.
        tokens: Number of tokens that the policy drew.
        end: Why it ended: a `FinishReason`, or an `EndReason` of a trajectory.
        thoughts: Whether the model or the thinking budget closed its thoughts; None without a budget.
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
    ended: WhenEnded | None = None,
) -> list[Said]:
    """Sample completions of one turn each; a thinking budget may close the policy's thoughts.

    Args:
        engine: Samples from the policy.
        tokenizer: Tokenizer of the policy.
        prompts: Token ids of each prompt.
        samples: Completions per prompt.
        params: Sampling parameters; a thinking budget is among the stops.
        seeds: One per completion; None derives them from ``params`` and the completions' indices.
        ended: As in `RolloutEngine.generate`; not called with a thinking budget.
    """
    if thinking_of(params.stops) is None:
        found = engine.generate(prompts, samples, params, seeds=seeds, ended=ended).completions
        texts = tokenizer.batch_decode([c.token_ids for c in found], skip_special_tokens=True)
        return [Said(text, len(c.token_ids), c.finish_reason) for text, c in zip(texts, found, strict=True)]
    with Conversations(tokenizer, None, Others(), ToolPool(1.0, 1), Limits()) as alone:  # nothing is called
        led = alone.sample(engine, params, None, prompts, samples, seeds)
    texts = tokenizer.batch_decode([t.token_ids for t in led], skip_special_tokens=True)
    return [_said(text, trajectory) for text, trajectory in zip(texts, led, strict=True)]


def in_conversations(
    conversations: Conversations,
    engine: RolloutEngine,
    rows: Sequence[Mapping[str, Any]],
    samples: int,
    params: SamplingParams,
    seeds: Sequence[int],
) -> list[Said]:
    """Sample conversations about some problems; samples of a problem are next to each other.

    Args:
        conversations: From `conversations_of`.
        engine: Samples from the policy.
        rows: The problems.
        samples: Conversations per problem.
        params: Sampling parameters.
        seeds: One per conversation.
    """
    opened = conversations.open([row for row in rows for _ in range(samples)])
    if conversations.endpoints:
        played = conversations.play(engine, params, None, seeds, fixed=False)
        engine.release()  # keys and values kept as prefixes, which are not needed any more
        return [_said(trajectory.messages, trajectory) for trajectory in played]
    prompts = conversations.prompt_ids(opened)
    once = prompts[::samples]
    if prompts != [prompt for prompt in once for _ in range(samples)]:  # samples have their own prompts
        once, samples = prompts, 1
    found = conversations.sample(engine, params, None, once, samples, seeds)
    return [_said(trajectory.messages, trajectory) for trajectory in found]


def conversations_of(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    *,
    tools: Sequence[str],
    environment: str | None,
    environment_options: Mapping[str, Any],
    max_tool_calling_iterations: int | None,
    tool_timeout: float,
    tool_errors: ToolErrors,
    tool_output_limit: int,
) -> Conversations:
    """Create the conversations of a policy with tools and an environment, named as in a recipe.

    Raises:
        QeRLError: A tool or the environment cannot be created, or the model's template has no tools.
    """
    make = None if environment is None else get_environment(environment, environment_options)
    others = check_others([get_tool(spec) for spec in tools], make)
    pool, limits = ToolPool(tool_timeout, tool_output_limit), Limits(max_tool_calling_iterations, tool_errors)
    return Conversations(tokenizer, template_kwargs, others, pool, limits)


def _said(text: str | list[Message], trajectory: Trajectory) -> Said:
    tokens = sum(sum(each.written) for each in (trajectory, *trajectory.forks))
    return Said(text, tokens, trajectory.end or "stop", trajectory.thoughts)
