"""Tables of completions that are whole, for training and for evaluation.

With `log_completions` TRL writes a table of the samples of each logged step. Three things stand in its way:

- An evaluation writes its table under the same name, over that of the step before it, and its samples then
  stand in the next step's table if that step uses an older rollout. Here evaluations fill a table of their
  own, which gets their prefix (`qerl.run_folder.table_path`).
- Parquet wants one type for each value. The arguments of tool calls have none: each tool has its own, a model
  writes what it likes, and a call without arguments is a structure without a field, which Parquet refuses. So
  arguments are written as JSON text, the form in which OpenAI's interface has them.
- What the disk refuses would end a run in a traceback; here it is a sentence.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow

from qerl.errors import QeRLError, first_line
from qerl.run_folder import COMPLETIONS_FOLDER, table_path


@contextlib.contextmanager
def written_whole(run: Path, step: int, evaluation: str, logs: dict[str, Any]) -> Iterator[None]:
    """A block in which TRL writes the table of a step.

    Args:
        run: The run folder.
        step: Optimizer steps done, after which TRL names the table.
        evaluation: Prefix of the evaluation that the table is of, empty for training.
        logs: TRL's table; structures in it become text that Parquet can hold.

    Raises:
        QeRLError: The table cannot be written.
    """
    for name in ("prompt", "completion"):
        for index, value in enumerate(logs[name]):
            logs[name][index] = _with_text_arguments(value)
    table = table_path(run, step)
    aside = table.with_suffix(".aside")
    try:
        if evaluation and table.exists():
            table.replace(aside)
        yield
        if evaluation and table.exists():
            table.replace(table_path(run, step, evaluation))
    except (OSError, pyarrow.ArrowException) as error:
        raise QeRLError(
            f"The completions of step {step} cannot be written to {run / COMPLETIONS_FOLDER} "
            f"({first_line(error)}); make room, or set log_completions: false."
        ) from error
    finally:
        if aside.exists():
            aside.replace(table)


def _with_text_arguments(conversation: Any) -> Any:
    """The same conversation, arguments of tool calls as JSON text; text stays as it is."""
    if not isinstance(conversation, list):
        return conversation
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and message.get("tool_calls")
        else message
        for message in conversation
    ]


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    arguments = call.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False, default=str)}
