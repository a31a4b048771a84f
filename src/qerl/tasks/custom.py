"""The user's own tasks, from a Python file.

A task is a class, named as ``PATH.py:Class``, that inherits from :class:`qerl.tasks.Task`. Missing methods,
exceptions of its code and malformed rows are reported in one sentence each, before a model is loaded where
possible: the loaded class is a subclass of the user's, whose constructor, ``train`` and ``test`` check their
results.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset

from qerl.errors import QeRLError, first_line
from qerl.tasks.base import Task
from qerl.tasks.formats import AnswerFormat
from qerl.user_code import load_object


def load_task(spec: str) -> type[Task]:
    """Load the task class ``PATH.py:Class``, whose constructor, ``train`` and ``test`` fail with `QeRLError`.

    Raises:
        QeRLError: The file is missing or fails to run, or its class is no task or lacks a method.
    """
    cls = load_object(spec, "task", kind="class")
    if not issubclass(cls, Task):
        raise QeRLError(f"{spec} is no task; let {cls.__name__} inherit from qerl.tasks.Task.")
    missing = sorted(cls.__abstractmethods__)
    if missing:
        raise QeRLError(
            f"Task {spec} lacks the method {' and the method '.join(missing)}, which give its training and "
            "its held-out problems."
        )
    checks: dict[str, Callable[[Any, Any], str]] = {
        "__init__": _wrong_with_task,
        "train": _wrong_with_rows,
        "test": _wrong_with_rows,
    }
    watched = {name: _watched(spec, getattr(cls, name), wrong) for name, wrong in checks.items()}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **watched})


def _watched(spec: str, method: Callable[..., Any], wrong: Callable[[Any, Any], str]) -> Callable[..., Any]:
    """Wrap a method so that its exceptions and wrong results become a `QeRLError` of one sentence."""

    @functools.wraps(method)
    def call(task: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = method(task, *args, **kwargs)
        except QeRLError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise QeRLError(f"Task {spec} fails in {method.__name__} ({cause}); fix the class.") from error
        fault = wrong(task, result)
        if fault:
            raise QeRLError(f"Task {spec}: {fault}.")
        return result

    return call


def _wrong_with_task(task: Any, _: Any) -> str:
    if isinstance(getattr(task, "format", None), AnswerFormat):
        return ""
    return "__init__ has to call super().__init__(name, qerl.tasks.get_format(...))"


def _wrong_with_rows(_: Any, rows: Any) -> str:
    if not isinstance(rows, Dataset):
        return f"train and test have to give a datasets.Dataset, not a {type(rows).__name__}"
    missing = [name for name in ("prompt", "answer") if name not in rows.column_names]
    if missing:
        return (
            f"its rows have no column {' and no column '.join(missing)}, but {', '.join(rows.column_names)}"
        )
    for number, (prompt, answer) in enumerate(zip(rows["prompt"], rows["answer"], strict=True)):
        if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
            return f"the prompt of row {number} is not a list of chat messages (make it with self.prompt)"
        if not isinstance(answer, str):
            return f"the answer of row {number} is {answer!r}, which has to be text"
    return ""


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
