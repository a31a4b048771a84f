"""A calculator: a tool for chat templates with tools, an environment that answers text for those without.

In text, the model writes an expression as the first line of its turn, and the calculator answers in a user's
turn with its value. A turn that begins otherwise, such as with ``####`` and the answer, ends the episode::

    71 * 68 =
                    4828
    #### 4828

Text after an equals sign is not read, so a model that states a result of its own is told the right one. That
matters at the start of training: small models write ``71 * 68 = 4428`` more often than the expression alone,
and a calculator that refused this would hardly ever be used, so no model would learn to use it.

Values are exact, and any text is safe: Python's own parser parses it, and the tree is evaluated here; nothing
is executed. Numbers are fractions, so ``0.1 + 0.2`` is 0.3 and ``7 / 2 * 2`` is 7. The length of the text and
the size of every intermediate value are bounded, exponents before the power is computed, so no expression
takes more than a fraction of a millisecond. Given up: functions, roots and irrational powers, which need a
sandbox with a language in it.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from qerl.errors import QeRLError

LONGEST = 200
"""Maximum number of characters in an expression."""

_MAX_BITS = 256
"""Size of numerators and denominators, in bits; about 77 digits."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})  # noqa: RUF001 - as people write
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TIMES = re.compile(r"(?<=[\d)])\s*x\s*(?=[\d(])")


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, ``+ - * / // % **`` and parentheses.

    ``×``, ``÷``, ``^``, ``3 x 4``, ``1,000`` and an equals sign at the end are read as people mean them.

    Raises:
        QeRLError: The text is no such expression, it divides by zero, or an intermediate value is too large.
    """
    if len(expression) > LONGEST:
        raise QeRLError(f"The expression has {len(expression)} characters; write at most {LONGEST}.")
    text = expression.strip().rstrip("?").rstrip().rstrip("=").strip().translate(_SIGNS)
    text = _TIMES.sub(" * ", _THOUSANDS.sub("", text))
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two: parentheses
        raise QeRLError(
            f"{expression.strip()!r} is no arithmetic expression; write one such as 3 * (4 + 5)."
        ) from error
    return _value(tree.body)


def written(value: Fraction) -> str:
    """A value as people write it: a whole number as such, any other rounded to ten significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return _number(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            try:
                return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
            except ZeroDivisionError as error:
                raise QeRLError("The expression divides by zero; write another one.") from error
    raise QeRLError(
        f"The expression holds {type(node).__name__}, which is no arithmetic; use numbers, + - * / // % ** "
        "and parentheses."
    )


def _number(value: int | float) -> Fraction:
    try:
        return _bounded(
            Fraction(str(value))
        )  # of a float the digits that were written, not their nearest double
    except ValueError as error:
        raise QeRLError(f"The number {value} is too large; use smaller ones.") from error


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise QeRLError(f"The exponent {written(exponent)} is no whole number; use whole ones.")
    if base == 0 and exponent < 0:
        raise QeRLError("The expression divides by zero; write another one.")
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > _MAX_BITS or abs(exponent) > 2**16:  # a base of 1 has no bits to multiply
        raise QeRLError("A power in the expression is too large; use a smaller exponent.")
    return _bounded(Fraction(base**exponent.numerator))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise QeRLError("A number in the expression is too large; use smaller ones.")
    return value


_OPERATION = re.compile(r"[\d)]\s*[-+*/%^×·÷−x]+\s*[-+\d(]")  # noqa: RUF001 - signs that people write
"""An operation, which a line must have before its equals sign to count as an expression."""


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 3 * (4 + 5).

    Returns:
        The value, rounded to ten significant digits if it is no whole number.
    """
    return written(evaluate(expression))


class Calculator:
    """A text environment that answers expressions with their values; it has no state."""

    def reset(self, **row: Any) -> None:
        """Begin an episode, which adds nothing to the prompt."""

    def respond(self, text: str) -> str | None:
        """Return the value of the expression in the first line, or an error sentence if it has none; None if
        the line is no expression."""
        lines = text.strip().splitlines()
        expression = lines[0].split("=")[0] if lines else ""
        if not _OPERATION.search(expression) or any(c.isalpha() and c != "x" for c in expression):
            return None
        try:
            return calculator(expression)
        except QeRLError as error:
            return str(error)
