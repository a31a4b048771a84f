"""What a task is: problems, the prompt around them, and rewards for completions.

A task knows nothing of models or trainers. Its rows are what TRL takes: ``prompt``, a list of chat messages,
and ``answer``, a string; further columns reach the reward functions by name. Training and evaluation build
the prompt in the same place, from the same answer format that the rewards check.

A task whose problems differ in a way that hides in the mean (one or two steps) names the column that says so,
its strata. Accuracy is then reported by its values too, in training and in evaluation.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from datasets import Dataset

from qerl.errors import QeRLError
from qerl.rewards.text import Completion, Message, completion_text
from qerl.tasks.answers import equal
from qerl.tasks.formats import AnswerFormat
from qerl.tasks.guard import judges_alone, stratified
from qerl.tasks.judging import RewardFunction

FORMAT_REWARD = 0.1
"""The reward for the form alone: enough to learn from, too little to be worth a wrong answer."""


class Task(ABC):
    """Problems of one kind.

    Attributes:
        name: The name by which recipes know the task.
        format: The form in which an answer is to be stated.
        opening: The beginning of the assistant's turn that the chat template itself writes
            (:attr:`qerl.models.chat.Chat.opening`). It is judged together with the completion: where the
            template opens a thinking section, a completion that is cut off inside that section has no
            answer, and a completion that closes it has the form asked for.
        strata: The column of the rows by whose values accuracy is reported too; None for none.
        on_hub: Whether its problems have to be fetched from the Hub, so that a dry run does not look at them.
    """

    opening: str = ""
    strata: str | None = None
    on_hub: bool = False

    def __init__(self, name: str, answer_format: AnswerFormat) -> None:
        self.name = name
        self.format = answer_format

    @abstractmethod
    def train(self) -> Dataset:
        """The training problems, with the columns ``prompt`` (chat messages) and ``answer`` (str).

        Raises:
            QeRLError: The task has no training problems, or they cannot be loaded.
        """

    @abstractmethod
    def test(self) -> Dataset:
        """The held-out problems, with the columns of :meth:`train`.

        Raises:
            QeRLError: The task has no held-out problems, or they cannot be loaded.
        """

    def epoch(self, rows: Dataset) -> Dataset:
        """The training rows as an epoch has them: each once, unless a task knows better.

        Args:
            rows: Those of :meth:`train` that are trained on; too long ones may be left out.

        Raises:
            QeRLError: They make no epoch.
        """
        return rows

    def of(self, row: Mapping[str, Any]) -> "Task":
        """The task that poses and judges a row: this one, unless it is made of several."""
        return self

    def extract(self, completion: Completion) -> str | None:
        """The final answer of a completion (text or chat messages), or None if it states none."""
        return self.format.extract(self._turn(completion))

    def same(self, answer: str, reference: str) -> bool:
        """Whether an answer is the right one; as mathematics, unless a task knows better."""
        return equal(answer, reference)

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """The task's reward functions with TRL's signature: ``accuracy`` (0 or 1) and ``format`` (0 or 0.1).

        They have no time limit of their own; training and evaluation wrap them in
        :func:`qerl.tasks.guard.guarded`, which sets one.
        """

        @judges_alone
        def accuracy(
            prompts: list,  # noqa: ARG001
            completions: list[Completion],
            answer: list[str],
            **_: Any,
        ) -> list[float | None]:
            extracted = [self.extract(completion) for completion in completions]
            return [
                float(found is not None and self.same(found, right))
                for found, right in zip(extracted, answer, strict=True)
            ]

        @judges_alone
        def format(
            prompts: list,  # noqa: ARG001
            completions: list[Completion],
            **_: Any,
        ) -> list[float | None]:
            return [FORMAT_REWARD * self.format.followed(self._turn(c)) for c in completions]

        return [accuracy if self.strata is None else stratified(accuracy, self.strata), format]

    def _turn(self, completion: Completion) -> str:
        text = completion_text(completion)
        return text if text.startswith(self.opening) else self.opening + text

    def prompt(self, question: str, worked: Iterable[tuple[str, str]] = ()) -> list[Message]:
        """The chat messages that pose a question: the format's instruction (if any), worked examples, it.

        Args:
            question: The text of the problem.
            worked: Pairs of a question and its full answer, shown as earlier turns.
        """
        instruction = self.format.instruction
        messages = [{"role": "system", "content": instruction}] if instruction else []
        for example, solution in worked:
            messages += [{"role": "user", "content": example}, {"role": "assistant", "content": solution}]
        return [*messages, {"role": "user", "content": question}]


def as_dataset(rows: Iterable[Mapping[str, Any]], what: str) -> Dataset:
    """A data set of the rows.

    Args:
        rows: The rows, all with the same columns.
        what: What the rows are, as the subject of an error's sentence.

    Raises:
        QeRLError: There are no rows.
    """
    data = [dict(row) for row in rows]
    if not data:
        raise QeRLError(f"{what} has no problems; check the file, the split and the filters.")
    return Dataset.from_list(data)
