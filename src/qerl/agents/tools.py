"""Tools: Python functions that a model may call, and their checks.

The chat template shows a tool to the model as a JSON schema, which is made from the function's types and its
docstring in Google style. A function that lacks either is refused before a model is loaded.
"""

import functools
from collections.abc import Callable
from typing import Any

from transformers.utils import get_json_schema

from qerl.errors import QeRLError, first_line

Tool = Callable[..., Any]
"""A function or a coroutine function with types and a docstring that describes every argument."""


def check_tool(tool: Tool) -> Tool:
    """Return the tool if its schema can be made for the model.

    Raises:
        QeRLError: The tool is not callable, or lacks a name, a docstring or types of its arguments.
    """
    if not callable(tool):
        raise QeRLError(f"A tool is a {type(tool).__name__}; pass functions.")
    name = tool_name(tool)
    try:
        get_json_schema(tool)
    except Exception as error:  # transformers has several classes for it, and parsing may raise its own
        raise QeRLError(
            f"The tool {name} cannot be shown to the model ({first_line(error)}); give it a type for every "
            "argument and a docstring that says what it does, with a line for each argument under 'Args:'."
        ) from error
    return tool


def tool_name(tool: Tool) -> str:
    """Return the name by which a model calls a tool.

    Raises:
        QeRLError: The tool has no name.
    """
    name = getattr(tool, "__name__", None)
    if isinstance(tool, functools.partial) or not name:
        raise QeRLError("A tool has no name by which a model could call it; pass functions or methods.")
    return name
