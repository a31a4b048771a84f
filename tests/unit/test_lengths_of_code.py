"""No file, class or function of the package and its benchmarks is too long to be read in one go."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE, CLASS, FUNCTION = 400, 250, 60
"""Lines at most, docstrings and comments included."""


def too_long(text: str) -> Iterator[str]:
    """Says what of a module's text is too long."""
    if (lines := len(text.splitlines())) > FILE:
        yield f"{lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > (CLASS if isinstance(node, ast.ClassDef) else FUNCTION):
                yield f"{node.name}: {lines} lines"


def test_nothing_is_too_long():
    files = [file for folder in ("src", "bench") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = {str(file.relative_to(ROOT)): [*too_long(file.read_text(encoding="utf-8"))] for file in files}
    assert not {name: what for name, what in found.items() if what}


def test_what_is_too_long_is_found():
    function = "    async def f():\n" + FUNCTION * "        x = 1\n"
    assert [*too_long("class A:\n" + function)] == [f"f: {FUNCTION + 1} lines"]
    assert [*too_long("class A:\n" + CLASS * "    x = 1\n")] == [f"A: {CLASS + 1} lines"]
    assert [*too_long((FILE + 1) * "x = 1\n")] == [f"{FILE + 1} lines"]
    assert not [*too_long(FILE * "x = 1\n")]
