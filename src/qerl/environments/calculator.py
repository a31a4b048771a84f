"""A calculator: a tool for chat templates with tools, an environment that answers text for those without.

In text, the model writes an expression as the first line of its turn, and the calculator answers in a user's
turn with its value. A turn that begins otherwise, such as with ``####`` and the answer, ends the episode::

    71 * 68 =
                    4828
    #### 4828

What follows an equals sign is not read, so a model that states a result of its own is told the right one.
That matters at the start of training: small models write ``71 * 68 = 4428`` more often than the expression
alone, and a calculator that refused this would hardly ever be used, so nobody would learn to.
"""

import re
from typing import Any

from qerl.environments.expressions import evaluate, written
from qerl.errors import QeRLError

_OPERATION = re.compile(r"[\d)]\s*[-+*/%^×·÷−x]+\s*[-+\d(]")  # noqa: RUF001 - signs that people write
"""What a line needs before its equals sign to be meant for the calculator."""


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 3 * (4 + 5).

    Returns:
        The value, rounded to ten significant digits if it is no whole number.
    """
    return written(evaluate(expression))


class Calculator:
    """Answers expressions with their values; it has no state."""

    def reset(self, **row: Any) -> None:
        """Begin an episode, which adds nothing to the prompt."""

    def respond(self, text: str) -> str | None:
        """The value of the expression in the first line, a sentence that says why it has none, or None where
        the line is no expression."""
        lines = text.strip().splitlines()
        expression = lines[0].split("=")[0] if lines else ""
        if not _OPERATION.search(expression) or any(c.isalpha() and c != "x" for c in expression):
            return None
        try:
            return calculator(expression)
        except QeRLError as error:
            return str(error)
