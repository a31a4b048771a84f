"""The part of the demo that plays: a policy with an environment on held-out problems, scored and shown.

The policy is loaded as `qerl eval` loads it, decodes greedily, and has the environment, the number of turns
and the tokens that it was trained with. The first conversations are printed, before training and after it,
because what the model has learned is seen there and not in a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from rich.console import Console

from qerl.agents.environment import EnvironmentFactory
from qerl.agents.loop import Limits, run_trajectories
from qerl.agents.pool import ToolPool
from qerl.agents.template import TurnTemplate
from qerl.agents.trajectory import Message, Trajectory
from qerl.agents.world import TextWorld
from qerl.environments import get_environment
from qerl.eval.evaluate import held_out
from qerl.eval.interval import accuracy_interval
from qerl.eval.policy import Policy, Source, decide, load
from qerl.eval.trained import Choices, Trained
from qerl.models.chat import Chat
from qerl.rollout.engine import SamplingParams
from qerl.settings.config import QeRLConfig
from qerl.tasks import get_task

_SHOWN = 3
"""Conversations that are printed."""


@dataclass(frozen=True)
class Score:
    """How many problems were solved.

    Attributes:
        problems: Number of problems.
        right: How many of them were solved.
    """

    problems: int
    right: int

    @property
    def accuracy(self) -> float:
        """The share that was solved."""
        return self.right / self.problems

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95 % interval."""
        solved = [1] * self.right + [0] * (self.problems - self.right)
        return accuracy_interval(solved, 1)


def play(config: QeRLConfig, adapter: Path | None, console: Console) -> Score:
    """Play the environment on `eval_samples` held-out problems, and print the first conversations.

    Args:
        config: Settings of the run, with a text environment.
        adapter: The adapter that was trained; None for the untrained model.
        console: Where the conversations go.

    Raises:
        QeRLError: The environment or the task is unknown, or the model cannot be loaded.
    """
    assert config.model is not None and config.task is not None and config.environment is not None
    factory = get_environment(config.environment, config.environment_options)
    task = get_task(config.task, **config.task_options)
    source = Source(
        config.model,
        adapter,
        weights=config.weights,
        rounding=config.rounding,
        dtype=config.dtype,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    policy = load(decide(source, Choices(Trained())), console)
    problems = held_out(task, config.eval_samples)
    played = _episodes(config, policy, problems, factory)
    answers = [task.extract(trajectory.messages) for trajectory in played]
    right = [a is not None and task.same(a, r["answer"]) for a, r in zip(answers, problems, strict=True)]
    for row, trajectory in zip(problems.select(range(min(_SHOWN, len(problems)))), played, strict=False):
        console.print(conversation(row["prompt"][-1]["content"], trajectory.messages), markup=False)
    return Score(len(problems), sum(right))


def conversation(question: str, messages: Sequence[Message]) -> str:
    """A conversation as lines, each with who speaks."""
    said = [("problem", question)]
    said += [("model" if m["role"] == "assistant" else "environment", m["content"]) for m in messages]
    return "\n".join(f"{who:>12}  {' / '.join(text.split(chr(10)))}" for who, text in said) + "\n"


def _episodes(
    config: QeRLConfig, policy: Policy, problems: Dataset, factory: EnvironmentFactory
) -> list[Trajectory]:
    """A greedy trajectory for each problem."""
    chat = Chat(policy.tokenizer, config.chat_template_kwargs)
    template = TurnTemplate(policy.tokenizer, config.chat_template_kwargs)
    params = SamplingParams(
        config.max_completion_length, temperature=0.0, stop_token_ids=policy.stop_token_ids
    )
    prompts, worlds = [], []
    for row in problems:
        environment = factory()
        shown = environment.reset(**row) or ""
        *before, last = row["prompt"]
        prompts.append(chat.ids([*before, last | {"content": last["content"] + shown}]))
        worlds.append(TextWorld(template, environment))
    pool = ToolPool(config.tool_timeout, config.tool_output_limit)
    limits = Limits(config.max_tool_calling_iterations, config.tool_errors)
    try:
        with policy.engine.session(params) as session:
            return run_trajectories(session, prompts, 1, worlds, pool, limits)
    finally:
        pool.close()
