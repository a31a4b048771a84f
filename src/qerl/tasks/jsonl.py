"""The user's own problems, from a file with one JSON object per line (``jsonl:PATH``).

A line states the problem in exactly one of three columns, and the right answer in ``answer``::

    {"question": "What is 7 x 6?", "answer": 42}
    {"messages": [{"role": "user", "content": "What is 7 x 6?"}], "answer": "42"}

``question`` and ``prompt`` are text, or chat messages as in ``messages``. The task's instruction is put in
front, unless the messages begin with a system message, which then has to ask for that format itself. Other
columns reach the reward functions by name, as None for lines that lack them. A column whose name TRL already
uses for an argument of reward functions is refused. ``completion``, a text or the assistant's messages, is
the reference solution, which ``algorithm: sft`` learns from; rewards never see it, as in TRL.

A bad line stops the run before it starts: dropping it would train on something other than the file.
"""

import json
import math
import stat
from decimal import Decimal
from pathlib import Path
from typing import Any

from datasets import Dataset

from qerl.errors import QeRLError
from qerl.models.chat import plain_message
from qerl.rewards.text import Message
from qerl.tasks.base import Task, as_dataset, assistant_says, holdout_rank
from qerl.tasks.formats import get_format

_PROBLEM_COLUMNS = ("prompt", "question", "messages")
# Columns that TRL passes to reward functions itself, drops, or reads as images or as the template of a row.
_TAKEN_COLUMNS = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    | {"environment", "environments", "image", "images", "chat_template_kwargs"}
)
_ROLES = ("system", "user", "assistant")


class Jsonl(Task):
    """Problems from a file.

    Args:
        path: The file with the problems.
        test_size: Number of problems to hold out. The problems alone decide which ones, so training and
            evaluation agree if they are given the same number.
        test_path: A second file with the held-out problems, in place of ``test_size``.
    """

    def __init__(self, path: str, test_size: int = 0, test_path: str | None = None) -> None:
        super().__init__(f"jsonl:{path}", get_format("boxed"))
        if not isinstance(test_size, int) or test_size < 0:
            raise QeRLError(f"test_size is {test_size!r}; it must be a number of problems, 0 or more.")
        if test_size and test_path is not None:
            raise QeRLError("test_size and test_path both say what is held out; give one of them.")
        self.path = Path(path).expanduser()
        self.test_size = test_size
        self.test_path = None if test_path is None else Path(test_path).expanduser()

    def train(self) -> Dataset:
        """The problems of the file without the held-out ones; see :meth:`Task.train`."""
        return self._rows(held_out=False)

    def test(self) -> Dataset:
        """The problems of the second file, or those that ``test_size`` holds out; see :meth:`Task.test`."""
        return self._rows(held_out=True)

    def demonstrations(self, held_out: bool = False) -> Dataset:
        """The problems with their completions; see :meth:`Task.demonstrations`."""
        return self._rows(held_out, solved=True)

    def _rows(self, held_out: bool, solved: bool = False) -> Dataset:
        if held_out and self.test_path is not None:
            return as_dataset(self._read(self.test_path, solved), f"The data file {self.test_path}")
        if held_out and not self.test_size:
            if not self.on_hub:
                read_lines(self.path)  # a wrong path is the first thing to mend
            raise QeRLError(
                f"Task {self.name} has no held-out problems; set test_size in task_options, or name a "
                "second file there with test_path."
            )
        rows = self._read(self.path, solved)
        others = self._held_out(rows)
        chosen = [row for row in rows if (_key(row) in others) == held_out]
        return as_dataset(chosen, f"The data file {self.path}")

    def _held_out(self, rows: list[dict[str, Any]]) -> set[str]:
        problems = {_key(row) for row in rows}
        if problems and self.test_size >= len(problems):
            raise QeRLError(
                f"test_size {self.test_size} leaves no training problem of the {len(problems)} different "
                f"ones in {self.path}; make it smaller."
            )
        return set(sorted(problems, key=holdout_rank)[: self.test_size])

    def _read(self, path: Path, solved: bool) -> list[dict[str, Any]]:
        rows = []
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip():
                try:
                    rows.append(self._row(_object(line), solved))
                except ValueError as error:
                    raise QeRLError(f"{path}, line {number}: {error}.") from error
        return rows

    def _row(self, row: dict[str, Any], solved: bool) -> dict[str, Any]:
        """Convert a line of the file to a row, with its completion if ``solved``.

        Raises:
            ValueError: The line is wrong; the message says how.
        """
        taken = sorted(_TAKEN_COLUMNS & row.keys())
        if taken:
            raise ValueError(f"the column {taken[0]} has a name that TRL uses itself; rename it")
        given = [column for column in _PROBLEM_COLUMNS if row.get(column) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a problem needs exactly one of the columns {', '.join(_PROBLEM_COLUMNS)}; this has "
                f"{' and '.join(given) or ', '.join(row) or 'no columns'}"
            )
        solution = self._solution(row)
        if solved:
            solution["completion"] = completion_of(row)
        others = {k: v for k, v in row.items() if k not in (*_PROBLEM_COLUMNS, *solution, "completion")}
        return {"prompt": self._messages(row[given[0]]), **solution, **others}

    def _solution(self, row: dict[str, Any]) -> dict[str, Any]:
        """The columns of the right answer."""
        return {"answer": _answer(row.get("answer"))}

    def _messages(self, problem: Any) -> list[Message]:
        if isinstance(problem, str):
            if not problem.strip():
                raise ValueError("the problem is empty")
            return self.prompt(problem)
        chat = messages_of(problem, "the problem", "user")
        own_instruction = chat[0]["role"] == "system"
        return chat if own_instruction else [*self.introduction(), *chat]


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a data file.

    Raises:
        QeRLError: The file cannot be read, or can be read only once.
    """
    try:
        if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise QeRLError(
                f"The data file {path} is a pipe or a device, and a task is read more than once; write "
                "the problems to a file."
            )
        return path.read_bytes().splitlines()
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        cause = getattr(error, "strerror", None) or error
        raise QeRLError(
            f"The data file {path} cannot be read ({cause}); check the path in task and task_options."
        ) from error


def _object(line: bytes) -> dict[str, Any]:
    """Parse a line of JSON.

    Raises:
        ValueError: The line is no JSON object, or a text in it has a lone surrogate.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("a line must be a JSON object with the columns question and answer")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text holds a lone surrogate ({error.object[error.start]!a}), which is half of a character"
        ) from error
    return row


def messages_of(value: Any, what: str, last: str) -> list[Message]:
    """Reduce chat messages to role and content, with parts of text joined.

    Args:
        value: The value in the file.
        what: The name of the value in errors.
        last: The required role of the last message.

    Raises:
        ValueError: The value is no list of such messages.
    """
    if not isinstance(value, list) or not all(map(_is_message, value)):
        raise ValueError(
            f"{what} must be text, or a list of messages with one of the roles {', '.join(_ROLES)}"
        )
    if not value or value[-1]["role"] != last:
        raise ValueError(f"the last message must be the {last}'s")
    try:
        return [plain_message(message, what) for message in value]
    except QeRLError as error:
        raise ValueError(str(error).removesuffix(".")) from error


def completion_of(row: dict[str, Any]) -> list[Message]:
    """Return the column ``completion`` of a row as chat messages.

    Raises:
        ValueError: The column is missing, or neither text nor chat messages.
    """
    completion = row.get("completion")
    if completion is None:
        raise ValueError("algorithm: sft learns from the column completion, which is missing; add it")
    if isinstance(completion, str) and completion:
        return assistant_says(completion)
    return messages_of(completion, "the completion", "assistant")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in _ROLES


def _answer(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(str(value)), "f")  # 1e-07 is no plain number to qerl.tasks.answers
    raise ValueError(f"the column answer must be text or a number; it is {json.dumps(value)}")


def _key(row: dict[str, Any]) -> str:
    """Return the problem alone: a changed instruction or answer must not move it into the other set."""
    messages = row.get("messages") or row["prompt"]
    if isinstance(messages, str):
        return json.dumps(messages)
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    begin = 1 if messages[0]["role"] == "system" else 0
    return json.dumps(messages[begin : users[-1] + 1 if users else None])
