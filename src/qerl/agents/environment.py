"""Environments: the other side of a trajectory, with a state of its own.

There are two kinds, distinguished by one method, and a third with its own class.

- **An environment with tools** is TRL's: ``reset`` begins an episode, and every other public method with a
  docstring and types is a tool that the model may call. It needs a model whose chat template has tools.
- **A text environment** has ``respond``: it is given what the model wrote in a turn and answers in a user's
  turn, which works with any chat template. It has no tools.
- **An endpoint** (`qerl.agents.outside.Endpoint`) does not drive the conversation: an external agent does,
  through OpenAI's chat API.

An environment with neither tools nor ``respond`` is TRL's too: it only adds to the prompt, which the policy
answers in one turn.

Environments are made once for each sample of a rollout and reset before each episode. ``reset`` receives the
columns of the row as keywords; a text that it returns is appended to the row's prompt. ``get_reward``, if
present, scores the episode, so that no reward function is needed.

The samples of a group are compared with each other, so ``reset`` and all answers must be determined by the
row and by the model's text. An environment that draws a random problem would give each sample a different
one.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from qerl.agents.outside import Endpoint
from qerl.agents.text import whole
from qerl.agents.tools import Tool, check_tool, tool_name
from qerl.errors import QeRLError, first_line

_NO_TOOLS = frozenset({"reset", "get_reward", "respond"})


@runtime_checkable
class Environment(Protocol):
    """An environment whose other public methods are tools."""

    def reset(self, **row: Any) -> str | None:
        """Begin an episode.

        Args:
            row: The columns of the data set's row, the prompt among them.

        Returns:
            A text for the end of the prompt's last message; None for nothing.
        """


@runtime_checkable
class TextEnvironment(Environment, Protocol):
    """An environment that answers what the model wrote."""

    def respond(self, text: str) -> str | None:
        """Answer a turn of the model, given as text without special tokens.

        Returns:
            The answer, which the model reads as a user's message; None ends the episode.
        """


EnvironmentFactory = Callable[[], Any]
"""Makes an environment that has not been reset."""


def make_factory(environment: Callable[..., Any], options: Mapping[str, Any]) -> EnvironmentFactory:
    """A factory of environments with these keyword arguments.

    Raises:
        QeRLError: The class does not take them.
    """
    name = getattr(environment, "__name__", "the environment")
    try:
        inspect.signature(environment).bind(**options)
    except TypeError as error:
        raise QeRLError(f"environment_options do not fit {name}: {error}; fix them.") from error
    return functools.partial(environment, **options)


def is_text(environment: Any) -> bool:
    """True if an environment, or its class, answers texts instead of having tools."""
    return callable(getattr(environment, "respond", None))


def is_endpoint(environment: Any) -> bool:
    """Return True if an external agent drives the conversation."""
    return isinstance(environment, Endpoint)


def tool_names(environment: Any) -> list[str]:
    """Names of an environment's tools: its class's public methods that the loop does not call itself."""
    if is_text(environment):
        return []
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in _NO_TOOLS]


def check_environment(factory: EnvironmentFactory) -> Any:
    """Make an environment on trial, and check it as far as possible without an episode.

    Raises:
        QeRLError: It cannot be made, has no `reset`, or a tool lacks its docstring or types.
    """
    try:
        environment = factory()
    except QeRLError:
        raise
    except (Exception, SystemExit) as error:
        raise QeRLError(
            f"The environment cannot be made: {type(error).__name__}: {first_line(error)}; fix its "
            "constructor, or environment_options."
        ) from error
    if inspect.isclass(environment):
        raise QeRLError(
            f"The environment factory returned the class {environment.__name__} and not an environment; pass "
            "the class itself, or call it."
        )
    name = type(environment).__name__
    if not callable(getattr(environment, "reset", None)):
        raise QeRLError(
            f"The environment {name} has no method reset(**row), which begins an episode; add one that "
            "returns what the model is shown, or None."
        )
    for tool in tool_names(environment):
        check_tool(getattr(environment, tool))
    return environment


def takes_turns(environment: Any) -> bool:
    """Return True if the policy may have several turns; other environments only add to the prompt."""
    return is_text(environment) or is_endpoint(environment) or bool(tool_names(environment))


def check_names(tools: Sequence[Tool], environments: Iterable[Any]) -> None:
    """Raise if two tools have the same name, by which a model calls them.

    Args:
        tools: Functions, each checked.
        environments: Their methods are tools, too. Methods of different environments may share a name,
            because a conversation has one environment.

    Raises:
        QeRLError: Two tools have one name.
    """
    names = [tool_name(tool) for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise QeRLError(f"Two tools are called {name}; rename one of them, or give it once.")
    for name in (method for environment in environments for method in tool_names(environment)):
        if name in names:
            raise QeRLError(f"The tool {name} has the name of an environment's method; rename one of them.")


def begin_episode(name: str, reset: Callable[..., Any], row: Mapping[str, Any]) -> str | None:
    """Begin an episode and return its first observation, as text that a tokenizer accepts.

    Args:
        name: Name of the environment's class.
        reset: The environment's method.
        row: The columns of the data set's row.

    Raises:
        QeRLError: `reset` raises, ends the process, or returns something else than a text or None.
    """
    try:
        observation = reset(**row)
    except QeRLError:
        raise
    except (Exception, SystemExit) as error:
        raise QeRLError(
            f"The environment {name} could not begin an episode: reset raised {type(error).__name__}: "
            f"{first_line(error)}; fix it, and let it take the row's columns: reset(self, **row)."
        ) from error
    if observation is not None and not isinstance(observation, str):
        raise QeRLError(
            f"reset of the environment {name} returned a {type(observation).__name__}; return a text, or "
            "None."
        )
    return whole(observation)
