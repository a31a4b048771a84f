"""Task sets of the package verifiers (``task: verifiers:NAME``): one answer per problem, their own rewards.

NAME is that of an installed package that exports a ``Taskset`` of verifiers 0.4, and the options are the
fields of its configuration. A problem's prompt is the task's. The reward ``accuracy`` is the weighted sum of
the task's rewards, as verifiers computes it offline: from the conversation alone. Evaluation counts 1 as
right.

Given up: tasks that need a container, tool servers or a user who talks back, and rewards that read the
machine on which an agent ran. verifiers runs such episodes by a program of its own, an agent that calls the
model over HTTP; here they are refused, and played through the endpoint of a run instead
(`qerl.agents.outside`, docs/examples/verifiers_calculator.py).
"""

import asyncio
import inspect
import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from datasets import Dataset
from pydantic import ValidationError

from qerl.errors import QeRLError, first_line
from qerl.kernels.needs import how_to_install
from qerl.tasks.base import Completion, Message, Task, as_dataset, holdout_rank
from qerl.tasks.formats import AnswerFormat
from qerl.tasks.guard import RewardFunction, judges_alone

HELD_OUT_SHARE = 1 / 8

_WHOLE = AnswerFormat("whole", "", lambda text: text.strip() or None, bool)
"""A task's own prompt asks for a form, and its own rewards look for it in the whole text."""


class Verifiers(Task):
    """The problems of one task set. One in eight is held out, by its prompt.

    Args:
        taskset: Name of the task set, as verifiers imports it.
        limit: Maximum number of problems to read; a task set may be infinite.
        config: Fields of the task set's configuration.

    Raises:
        QeRLError: verifiers or the task set is missing, it refuses its configuration, or its tasks need more
            than an answer.
    """

    def __init__(self, taskset: str, limit: int = 4096, **config: Any) -> None:
        super().__init__(f"verifiers:{taskset}", _WHOLE)
        if limit < 1:
            raise QeRLError(f"limit is {limit}; read at least one problem.")
        self._tasks = _load(taskset, limit, config)

    def ask(self, system_prompt: str | None = None, answer_format: str | None = None) -> None:
        """See :meth:`Task.ask`.

        Raises:
            QeRLError: An answer format is given; the task set's rewards look for their own.
        """
        if answer_format is not None:
            raise QeRLError(f"{self.name} is judged by rewards of its own; remove answer_format.")
        super().ask(system_prompt)

    def train(self) -> Dataset:
        """The problems that are not held out, in the task set's order; see :meth:`Task.train`."""
        return self._rows("training")

    def test(self) -> Dataset:
        """The held-out problems, in the task set's order; see :meth:`Task.test`."""
        return self._rows("held-out")

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """``accuracy``, the weighted sum of the task's own rewards; see :attr:`Task.rewards`."""

        @judges_alone
        def accuracy(
            prompts: list[list[Message]],
            completions: list[Completion],
            index: list[int],
            **_: Any,
        ) -> list[float | None]:
            given = zip(prompts, completions, index, strict=True)
            return [self.score(prompt, self._turn(text), i) for prompt, text, i in given]

        return [accuracy]

    def score(self, prompt: list[Message], answer: str, index: int) -> float:
        """Return the weighted sum of the rewards of problem number ``index`` for an answer to its prompt."""
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        task = self._tasks[index]
        messages = [*prompt, {"role": "assistant", "content": answer}]
        nodes = [
            MessageNode(parent=i - 1 if i else None, message=message, sampled=i == len(prompt))
            for i, message in enumerate(messages)
        ]
        about = TraceTask(type=type(task).__name__, data=task.data)
        trace = Trace(task=about, agent=AgentInfo(config=AgentConfig()), nodes=nodes)
        asyncio.run(task.score(trace))
        return float(trace.reward)

    def _rows(self, split: str) -> Dataset:
        held_out = split == "held-out"
        rows = (
            {"prompt": messages, "answer": str(getattr(task.data, "answer", "")), "index": index}
            for index, (task, messages) in enumerate(zip(self._tasks, self._messages(), strict=True))
            if (holdout_rank(messages[-1]["content"]) < HELD_OUT_SHARE) == held_out
        )
        return as_dataset(rows, f"Task {self.name}, {split} set,")

    def _messages(self) -> Iterator[list[Message]]:
        for task in self._tasks:
            data = task.data
            system = data.system_prompt if self.system_prompt is None else self.system_prompt
            asked = [("user", data.prompt)] if isinstance(data.prompt, str) else _texts(data.prompt)
            said = [("system", system), *asked] if system else asked
            yield [{"role": role, "content": text} for role, text in said]


def _texts(messages: Any) -> list[tuple[str, str]]:
    if any(not isinstance(message.content, str) for message in messages):
        raise QeRLError("A prompt of the task set has content other than text, which tasks do not support.")
    return [(message.role, message.content) for message in messages]


def _load(taskset: str, limit: int, config: dict[str, Any]) -> list[Any]:
    """The tasks of a task set."""
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
    except ImportError as error:
        raise QeRLError(
            f"Tasks verifiers:NAME need the package verifiers; run `{how_to_install('verifiers')}`."
        ) from error
    try:
        found = load_taskset(taskset_config_type(taskset).model_validate({"id": taskset, **config}))
        tasks = list(itertools.islice(found, limit))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the configuration"
        raise QeRLError(
            f"Task verifiers:{taskset} refuses {where}: {first['msg']}; fix task_options."
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise QeRLError(
            f"The task set {taskset} cannot be loaded ({first_line(error)}); check its name, and whether it "
            "is installed."
        ) from error
    for task in tasks:
        if reason := _needs_more(task):
            raise QeRLError(
                f"Task verifiers:{taskset} {reason}, which only verifiers' own episodes support; run those "
                "with environment: endpoint:PATH.py:function (docs/agents.md)."
            )
    return tasks


def _needs_more(task: Any) -> str:
    """Return what a task needs besides an answer, in words; empty for nothing."""
    if type(task).NEEDS_CONTAINER:
        return "needs a container"
    if type(task).toolsets(task.config):
        return "brings tool servers"
    if task.data.prompt is None:
        return "has no prompt, because a user opens the conversation"
    for reward in task.hooks("reward"):
        parameter = inspect.signature(reward).parameters.get("runtime")
        if parameter is not None and parameter.default is parameter.empty:
            return f"has the reward {reward.__name__}, which reads the agent's machine"
    return ""
