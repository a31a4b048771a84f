"""Who imports whom: rooms know those below them in ARCHITECTURE's table, the core knows nothing beside it."""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from qerl import __version__
from qerl.cli import main

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "qerl"
SERVE = ROOT / "packages" / "serve"


def table() -> list[list[str]]:
    """Rooms of each row of ARCHITECTURE's table, from above to below."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = text.split("| room of `src/qerl` |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1]) for row in rows]


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files below a folder with the module or name that each import names, wherever it stands in the file."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                for alias in node.names:
                    yield path, f"{node.module}.{alias.name}"


def of_core(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files below a folder with the room of the core that each import reaches; the version is in none."""
    for path, name in imports(folder):
        package, _, rest = name.partition(".")
        if package == "qerl" and rest != "__version__":
            yield path, rest.partition(".")[0]


def room(path: Path) -> str:
    return path.relative_to(CORE).with_suffix("").parts[0]


def test_the_table_names_every_room():
    there = {room(path) for kind in ("*.py", "*.yaml") for path in CORE.rglob(kind)}
    named = [name for row in table() for name in row]
    assert len(named) == len(set(named))
    assert set(named) == there - {"__init__"}  # the package's front, which names what users import


def test_rooms_know_only_those_below():
    rank = {name: place for place, row in enumerate(table()) for name in row}
    beside: dict[str, set[str]] = {name: set() for name in rank}
    for path, target in of_core(CORE):
        own = room(path)
        if own in ("__init__", target):
            continue
        assert target in rank, f"{path}: {target} is no room; import from the room that has it"
        assert rank[own] <= rank[target], f"{path}: {own} stands below {target}"
        if rank[own] == rank[target]:
            beside[own].add(target)
    TopologicalSorter(beside).prepare()  # raises if rooms of one row know each other in a circle


def test_the_core_knows_nothing_beside_it():
    for path, name in imports(CORE):
        assert name.partition(".")[0] not in ("qerl_serve", "lab", "bench", "tests"), f"{path}: {name}"


def test_the_server_knows_the_core_from_the_update_down():
    rows = table()
    below = {name for row in rows[rows.index(["update"]) :] for name in row} - {"plan"}
    for path, target in of_core(SERVE / "src"):
        assert target in below, f"{path}: {target}"
    for path, name in imports(SERVE / "src"):
        assert name.partition(".")[0] not in ("lab", "bench", "tests"), f"{path}: {name}"


def test_both_distributions_have_one_version():
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    serve = tomllib.loads((SERVE / "pyproject.toml").read_text())["project"]
    asked = {str(wanted) for wanted in map(Requirement, serve["dependencies"]) if wanted.name == "qerl"}
    assert serve["version"] == __version__
    assert asked == {f"qerl=={__version__}"}
    assert core["optional-dependencies"]["serve"] == [f"qerl-serve=={__version__}"]


def test_without_the_server_its_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("qerl.cli.entry_points", lambda **asked: ())
    assert main(["serve", "some/model"]) == 2
    assert "pip install 'qerl[serve]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert " serve " not in capsys.readouterr().out


def test_what_others_add_cannot_hinder_a_command_of_the_core(monkeypatch, capsys):
    class Broken:
        def load(self):
            raise ImportError("made for another version")

    monkeypatch.setattr("qerl.cli.entry_points", lambda **asked: (Broken(),))
    assert main(["recipes"]) == 0
    assert "gsm8k" in capsys.readouterr().out
    with pytest.raises(ImportError):
        main(["serve", "some/model"])
