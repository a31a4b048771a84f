"""Tools and environments of the user's own: how they are found, and what is refused in a sentence."""

import functools
from functools import partial

import pytest

from qerl.agents.environment import (
    Environment,
    TextEnvironment,
    check_environment,
    is_text,
    tool_names,
)
from qerl.agents.tools import check_tool
from qerl.environments.registry import get_environment, get_tool
from qerl.errors import QeRLError
from qerl.user_code import load_object

FILE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b

def untold(a: int) -> int:
    return a

class Counter:
    def __init__(self, start: int = 0):
        self.start = start

    def reset(self, **row):
        self.count = self.start
        return "Count."

    def up(self, by: int) -> int:
        """Count up.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        return float(self.count)
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


class Echo:
    def reset(self, **row):
        return None

    def respond(self, text):
        return text

    def helper(self):
        pass


def test_tools_and_environments_are_loaded_from_a_file(file):
    assert get_tool(f"{file}:add")(2, 3) == 5
    factory = get_environment(f"{file}:Counter", {"start": 4})
    environment = check_environment(factory)
    assert environment.reset() == "Count." and environment.up(2) == 6
    assert tool_names(environment) == ["up"]
    assert isinstance(environment, Environment) and not isinstance(environment, TextEnvironment)


def test_an_environment_that_responds_has_no_tools():
    environment = check_environment(Echo)
    assert isinstance(environment, TextEnvironment)
    assert is_text(environment) and is_text(Echo) and tool_names(environment) == []


def no_docstring(a: int):
    return a


def no_type(a):
    """Does.

    Args:
        a: A number.
    """


def no_line(a: int):
    """Does."""


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (no_docstring, "The tool no_docstring cannot be shown to the model .*no docstring"),
        (no_type, "The tool no_type cannot be shown to the model .*missing a type hint"),
        (no_line, "The tool no_line cannot be shown .*no description for the argument 'a'"),
        (functools.partial(no_line, a=1), "no name by which a model could call it"),
        (3, "A tool is a int; pass functions"),
    ],
)
def test_a_tool_that_the_model_cannot_be_told_of_is_refused(tool, said):
    with pytest.raises(QeRLError, match=said):
        check_tool(tool)


class NoReset:
    def respond(self, text):
        return None


class Nothing:
    def reset(self, **row):
        return None


class Untold(Nothing):
    def act(self, a):
        return a


def broken():
    raise RuntimeError("no board")


def leaving():
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (NoReset, r"The environment NoReset has no method reset\(\*\*row\)"),
        (Untold, "The tool act cannot be shown to the model"),
        (broken, "cannot be made: RuntimeError: no board"),
        (leaving, "cannot be made: SystemExit: 0"),
    ],
)
def test_an_environment_without_an_other_side_is_refused(factory, said):
    with pytest.raises(QeRLError, match=said):
        check_environment(factory)


def test_options_that_a_class_does_not_take_are_refused(file):
    with pytest.raises(QeRLError, match=r"environment_options do not fit Counter: .*'end'"):
        get_environment(f"{file}:Counter", {"end": 4})


environment = partial(get_environment, options={})
class_of = partial(load_object, what="environment", kind="class")


@pytest.mark.parametrize(
    ("load", "name", "said"),
    [
        (partial(load_object, what="tool"), "add", "Tool 'add' is not of the form PATH.py:function"),
        (get_tool, "mine.py:ad", r"mine\.py has no function 'ad'; it has: add, untold"),
        (get_tool, "mine.py:untold", "The tool untold cannot be shown"),
        (get_tool, "none.py:ad", r"The tool file .*none\.py does not exist"),
        (
            environment,
            "mine.py:add",
            r"mine\.py has no class 'add'; it has: Counter",
        ),
        (
            class_of,
            "calc",
            "Environment 'calc' is not of the form PATH.py:Class",
        ),
    ],
)
def test_what_a_file_does_not_hold_is_said(file, load, name, said):
    with pytest.raises(QeRLError, match=said):
        load(f"{file.parent}/{name}" if ":" in name else name)
