"""Checks of answers before they reach a scorer that evaluates them as Python.

Some scorers of other packages call ``eval`` or sympy's ``parse_expr`` on the answer. A policy's text would
then run in the training process, with all its rights, and a policy that is rewarded for the result has every
reason to find that out: ``entry['answer']`` is right in any of them. So an answer reaches such a scorer only
if it is a literal or a formula, by its syntax tree, and not one that takes long to compute.

Given up: formulas in notation that Python does not parse, such as ``2x`` or ``5!``, earn nothing there.
"""

import ast
from typing import Literal

Kind = Literal["literal", "formula"]

_LONGEST = 2000
_LARGEST_EXPONENT = 20
_LONGEST_NUMBER = 10**15
_FUNCTIONS = frozenset(
    {"exp", "log", "ln", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"}
)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd)


def may_be_evaluated(answer: str, kind: Kind) -> bool:
    """True if evaluating an answer runs nothing and ends soon.

    Args:
        answer: The model's text.
        kind: ``literal`` (numbers, strings, lists of them, or text that is no Python), or ``formula``
            (numbers, variables of one letter, arithmetic, powers with small whole exponents, elementary
            functions).
    """
    if len(answer) > _LONGEST:
        return False
    try:
        tree = ast.parse(answer, mode="eval").body
    except (SyntaxError, ValueError):
        return kind == "literal"  # eval would raise the same; sympy reads more than Python does
    except (MemoryError, RecursionError):
        return False
    try:
        return _is_literal(tree) if kind == "literal" else _is_formula(tree)
    except RecursionError:
        return False


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(_is_literal, node.elts))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_number(node.operand)
    return _is_number(node) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_formula(node: ast.expr, below_power: bool = False) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return not below_power and _is_formula(node.left, True) and _is_exponent(node.right)
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        return isinstance(node.op, _OPERATORS) and all(_is_formula(side, below_power) for side in sides)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, _OPERATORS) and _is_formula(node.operand, below_power)
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        return named and not node.keywords and all(_is_formula(a, below_power) for a in node.args)
    return _is_number(node) or (isinstance(node, ast.Name) and len(node.id) == 1)


def _is_exponent(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value <= _LARGEST_EXPONENT


def _is_number(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and type(node.value) in (int, float)
        and isinstance(node.value, int | float)
        and abs(node.value) <= _LONGEST_NUMBER
    )
