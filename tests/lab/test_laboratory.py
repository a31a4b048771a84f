"""The laboratory lies beside the package: it imports the core and `bench`, and neither imports it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(file: Path) -> set[str]:
    """First names of the modules that a file imports, wherever it does."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.partition(".")[0]
        for name in plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    }


STANDS_ON = {"src/qerl": {"bench", "lab", "tests"}, "bench": {"lab", "tests"}, "lab": {"tests"}}
"""What may import a folder and is not imported by it."""


@pytest.mark.parametrize(("room", "beside"), STANDS_ON.items())
def test_nothing_imports_what_stands_on_it(room, beside):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files and {file: imported(file) & beside for file in files if imported(file) & beside} == {}
