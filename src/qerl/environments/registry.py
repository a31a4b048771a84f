"""Environments by name, as recipes give them: built-in ones, adapters, and classes of the user's own."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from qerl.agents.environment import EnvironmentFactory, make_factory
from qerl.agents.outside import Endpoint
from qerl.agents.tools import Tool, check_tool
from qerl.environments.calculator import Calculator, calculator
from qerl.environments.guess_number import GuessNumber
from qerl.environments.openenv import OpenEnv
from qerl.errors import QeRLError, did_you_mean
from qerl.user_code import load_object, names_a_file

ENVIRONMENTS: dict[str, Callable[..., Any]] = {"calculator": Calculator, "guess_number": GuessNumber}
"""The class of each built-in environment; its keyword arguments are ``environment_options``."""

FAMILIES: dict[str, Callable[..., Any]] = {"openenv": OpenEnv}
"""Adapters: the class of the environments FAMILY:WHERE, which takes WHERE and the options."""

ENDPOINT = "endpoint"
"""The prefix in ``endpoint:PATH.py:function``, the environment of an external agent, the function."""

TOOLS: dict[str, Tool] = {"calculator": calculator}
"""Built-in tools, for models whose chat template has tools."""


def get_environment(spec: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    """Return a factory of the named environments.

    Args:
        spec: A name from :data:`ENVIRONMENTS`, FAMILY:WHERE with one of :data:`FAMILIES`,
            ``endpoint:PATH.py:function``, or ``PATH.py:Class`` for a class of the user's own.
        options: Keyword arguments of the class.

    Raises:
        QeRLError: The environment is unknown or cannot be loaded, or the class does not take the options.
    """
    family, _, where = spec.partition(":")
    if family == ENDPOINT:
        return make_factory(functools.partial(Endpoint, load_object(where, "agent")), options)
    if family in FAMILIES and where:
        return make_factory(functools.partial(FAMILIES[family], where), options)
    if names_a_file(spec):
        return make_factory(load_object(spec, "environment", "class"), options)
    return make_factory(_known(spec, ENVIRONMENTS, "environment", "Class"), options)


def get_tool(spec: str) -> Tool:
    """Return the named tool: one of :data:`TOOLS`, or ``PATH.py:function``.

    Raises:
        QeRLError: The tool is unknown, cannot be loaded, or lacks types or docstring.
    """
    if names_a_file(spec):
        return check_tool(load_object(spec, "tool"))
    return _known(spec, TOOLS, "tool", "function")


def _known(name: str, known: Mapping[str, Any], what: str, kind: str) -> Any:
    if name not in known:
        raise QeRLError(
            f"The {what} {name!r} is unknown{did_you_mean(name, known)}; give PATH.py:{kind} for one of your "
            f"own, or one of: {', '.join(known)}."
        )
    return known[name]
