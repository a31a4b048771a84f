"""Tasks: problems, the prompt around them, and rewards for completions.

A task knows nothing of models or trainers. Its rows have TRL's form: ``prompt``, a list of chat messages, and
``answer``, a string; further columns reach the reward functions by name. Training and evaluation build the
prompt in the same place, from the same answer format that the rewards check.

A task whose problems differ in a way that a mean hides (one or two steps) names the column with that
difference, its strata. Accuracy is then also reported per value of this column, in training and evaluation.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import pyarrow
from datasets import Dataset

from qerl.errors import QeRLError, first_line
from qerl.rewards.text import Completion, Message, completion_text
from qerl.seeding import derive_seed
from qerl.tasks.answers import equal
from qerl.tasks.formats import AnswerFormat, get_format
from qerl.tasks.guard import RewardFunction, judges_alone, stratified

FORMAT_REWARD = 0.1
"""The reward for the form alone: enough to learn from, too little to be worth a wrong answer."""


class Task(ABC):
    """Problems of one kind.

    Attributes:
        name: The name by which recipes know the task.
        format: The form in which an answer is to be stated.
        system_prompt: The system message; None for the format's instruction, empty for none.
        opening: The beginning of the assistant's turn that the chat template itself writes
            (:attr:`qerl.models.chat.Chat.opening`), which is judged together with the completion: where the
            template opens a thinking section, a completion that is cut off inside it has no answer, and one
            that closes it has the required form.
        strata: The column of the rows per value of which accuracy is also reported; None for none.
        on_hub: True if its problems are fetched from the Hub, so that a dry run does not look at them.
    """

    system_prompt: str | None = None
    opening: str = ""
    strata: str | None = None
    on_hub: bool = False

    def __init__(self, name: str, answer_format: AnswerFormat) -> None:
        self.name = name
        self.format = answer_format

    def ask(self, system_prompt: str | None = None, answer_format: str | None = None) -> None:
        """Set the prompt options that every task has.

        Args:
            system_prompt: Replaces the answer format's instruction; it then has to ask for the form itself.
                Empty for none, None for no change. Problems with a system message of their own keep it.
            answer_format: Name of a format of :data:`qerl.tasks.formats.FORMATS`; None for no change.

        Raises:
            QeRLError: A value is wrong, or the task does not support the option.
        """
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise QeRLError(f"system_prompt is {system_prompt!r}; it must be text, empty for none.")
        if answer_format is not None:
            self.format = get_format(answer_format)
        if system_prompt is not None:
            self.system_prompt = system_prompt

    @property
    def instruction(self) -> str:
        """The system message of every problem; empty for none."""
        return self.format.instruction if self.system_prompt is None else self.system_prompt

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

    def demonstrations(self, held_out: bool = False) -> Dataset:
        """The problems with their reference solutions, which ``algorithm: sft`` learns from: the rows of
        :meth:`train`, or of :meth:`test` if ``held_out``, with a column ``completion`` (chat messages).

        Raises:
            QeRLError: The task has no such solutions, or they cannot be loaded.
        """
        raise QeRLError(
            f"Task {self.name} has no reference solutions that algorithm: sft could learn from; use "
            "arithmetic, gsm8k, jsonl:PATH with a column completion, or demonstrations:PATH."
        )

    def epoch(self, rows: Dataset) -> Dataset:
        """The training rows of an epoch: each once, unless a task overrides this.

        Args:
            rows: The rows of :meth:`train` in use; too long ones may be missing.

        Raises:
            QeRLError: No epoch can be made of these rows.
        """
        return rows

    def of(self, row: Mapping[str, Any]) -> "Task":
        """Return the task that poses and judges a row: this task, or in a mixture the row's part."""
        return self

    def extract(self, completion: Completion) -> str | None:
        """The final answer of a completion (text or chat messages), or None if it states none."""
        return self.format.extract(self._turn(completion))

    def same(self, answer: str, reference: str) -> bool:
        """Return True if an answer equals the reference, as mathematics unless a task overrides this."""
        return equal(answer, reference)

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """The task's reward functions with TRL's signature: ``accuracy`` (0 or 1) and ``format`` (0 or 0.1).

        They have no time limit of their own; training and evaluation wrap them in
        :func:`qerl.tasks.together.guarded`, which sets one.
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
        """The chat messages that pose a question: the instruction (if any), worked examples, the question.

        Args:
            question: The text of the problem.
            worked: Pairs of a question and its full answer, shown as earlier turns.
        """
        messages = self.introduction()
        for example, solution in worked:
            messages += [{"role": "user", "content": example}, {"role": "assistant", "content": solution}]
        return [*messages, {"role": "user", "content": question}]

    def introduction(self) -> list[Message]:
        """The messages before a problem: the instruction, if there is one."""
        return [{"role": "system", "content": self.instruction}] if self.instruction else []


def assistant_says(text: str) -> list[Message]:
    """A completion as chat messages."""
    return [{"role": "assistant", "content": text}]


def as_dataset(rows: Iterable[Mapping[str, Any]], what: str) -> Dataset:
    """Make a data set of rows; a column that a row lacks is None there.

    Args:
        rows: The rows.
        what: The subject of error messages.

    Raises:
        QeRLError: There are no rows, or a column has values of different types.
    """
    rows = list(rows)
    if not rows:
        raise QeRLError(f"{what} has no problems; check the file, the split and the filters.")
    columns = dict.fromkeys(column for row in rows for column in row)
    try:
        return Dataset.from_list([{**columns, **row} for row in rows])
    except (pyarrow.ArrowException, OverflowError) as error:
        raise QeRLError(
            f"{what} has a column of values of different types, or with too large a number "
            f"({first_line(error)}); use one type for each column, and text for numbers beyond 64 bits."
        ) from error


def holdout_rank(problem: str) -> float:
    """Return the rank of a problem in data without a test split, uniform in [0, 1).

    The problems with the lowest ranks are held out. The rank is a hash of the text, so neither the machine,
    the order of the rows nor the seed of a run moves a problem into the other set, and copies of a problem
    are in the same set.
    """
    return derive_seed("held out", problem) / 2**63
