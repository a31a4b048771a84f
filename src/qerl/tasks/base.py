"""What a task is: problems, the prompt around them, and rewards for completions.

A task knows nothing of models or trainers. Its rows are what TRL takes: ``prompt``, a list of chat messages,
and ``answer``, a string; further columns reach the reward functions by name. Training and evaluation build
the prompt in the same place, from the same answer format that the rewards check.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from datasets import Dataset

from qerl.errors import QeRLError
from qerl.tasks.answers import equal
from qerl.tasks.formats import AnswerFormat, get_format
from qerl.tasks.guard import RewardFunction, judges_alone

Message = dict[str, str]
Completion = str | list[Message]

FORMAT_REWARD = 0.1
"""Paid for the form alone: enough to be learnt from, too little to be worth a wrong answer."""


class Task(ABC):
    """Problems of one kind.

    Attributes:
        name: As recipes name it.
        format: How an answer is to be stated.
        opening: What the chat template has already written of the assistant's turn, from
            :attr:`qerl.models.chat.Chat.opening`. It is judged with the completion: a completion that is
            cut off within a thinking that the template began has no answer, and one that ends it has the
            form asked for.
    """

    opening: str = ""

    def __init__(self, name: str, answer_format: str) -> None:
        self.name = name
        self.format: AnswerFormat = get_format(answer_format)

    @abstractmethod
    def train(self) -> Dataset:
        """Training problems: columns ``prompt`` (chat messages) and ``answer`` (str).

        Raises:
            QeRLError: The task has no training problems, or they cannot be loaded.
        """

    @abstractmethod
    def test(self) -> Dataset:
        """Held-out problems, with the columns of :meth:`train`.

        Raises:
            QeRLError: The task has no held-out problems, or they cannot be loaded.
        """

    def extract(self, completion: Completion) -> str | None:
        """Final answer of a completion (a string or chat messages), or None if it gives none."""
        return self.format.extract(self._turn(completion))

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """Reward functions with TRL's signature: ``accuracy`` (0 or 1) and ``format`` (0 or 0.1).

        Training and evaluation guard them (:func:`qerl.tasks.guard.guarded`), which sets the time limit.
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
                float(found is not None and equal(found, right))
                for found, right in zip(extracted, answer, strict=True)
            ]

        @judges_alone
        def format(
            prompts: list,  # noqa: ARG001
            completions: list[Completion],
            **_: Any,
        ) -> list[float | None]:
            return [FORMAT_REWARD * self.format.followed(self._turn(c)) for c in completions]

        return [accuracy, format]

    def _turn(self, completion: Completion) -> str:
        text = completion_text(completion)
        return text if text.startswith(self.opening) else self.opening + text

    def prompt(self, question: str, worked: Iterable[tuple[str, str]] = ()) -> list[Message]:
        """Chat messages for a question: the format's instruction, worked examples as turns, the question.

        Args:
            question: The problem's text.
            worked: Questions and full answers shown before it.
        """
        messages = [{"role": "system", "content": self.format.instruction}]
        for example, solution in worked:
            messages += [{"role": "user", "content": example}, {"role": "assistant", "content": solution}]
        return [*messages, {"role": "user", "content": question}]


def completion_text(completion: Completion) -> str:
    """Text of a completion: itself, or what its chat messages say, with thinking between its tags again.

    TRL takes the thinking out of the text where a tokenizer brings a template for parsing responses.
    """
    return completion if isinstance(completion, str) else "".join(map(_message_text, completion))


def _message_text(message: Message) -> str:
    thinking = message.get("reasoning_content") or message.get("thinking")
    return (f"<think>{thinking}</think>" if thinking else "") + (message.get("content") or "")


def as_dataset(rows: Iterable[Mapping[str, Any]], what: str) -> Dataset:
    """Data set of the rows.

    Raises:
        QeRLError: There are none.
    """
    data = [dict(row) for row in rows]
    if not data:
        raise QeRLError(f"{what} has no problems; check the file, the split and the filters.")
    return Dataset.from_list(data)
