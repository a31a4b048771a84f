"""Environments of OpenEnv (``environment: openenv:WHERE``), from the package openenv-core.

WHERE is the URL of a running server, or a class that runs in this process: ``PATH.py:Class`` or
``module:Class``. Either way an episode is `reset` and `step` with actions and observations that have fields.
The model's text becomes an action: the value of one field, or a JSON object with all of them. The model reads
one field of the observation, or a JSON object of those that are not about the episode itself.

An action that the environment does not accept costs a turn and is answered with the reason, so the model can
write a better one. The reward is the sum over the steps. A server has one session per trajectory and has to
allow as many at the same time as a rollout has samples (``max_concurrent_envs``).

Given up: environments whose tools are called through MCP, and images in observations.
"""

import contextlib
import importlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from qerl.errors import QeRLError, first_line
from qerl.kernels.needs import how_to_install
from qerl.seeding import derive_seed
from qerl.user_code import load_object, names_a_file

_OF_THE_EPISODE = frozenset({"done", "reward", "metadata"})
_SERVER = ("http://", "https://", "ws://", "wss://")


class OpenEnv:
    """An environment of OpenEnv as one that answers text.

    Args:
        where: URL of a server, or the class.
        action_field: The field of an action that takes the model's text. By default the only required field,
            if the class runs here, else a JSON object is expected.
        observation_field: The field of an observation that the model reads. By default the only one, else all
            of them as JSON.
        reset_columns: Columns of the row that `reset` is given, besides ``seed``. The seed is the row's
            column of that name, or follows from its prompt, so that all samples of a group meet the same
            episode.
        class_options: Keyword arguments of the class; a server's were given where it was started.

    Raises:
        QeRLError: The package is missing, the class cannot be loaded, or the server cannot be reached.
    """

    def __init__(
        self,
        where: str,
        action_field: str | None = None,
        observation_field: str | None = None,
        reset_columns: Sequence[str] = (),
        class_options: Mapping[str, Any] | None = None,
    ) -> None:
        if where.startswith(_SERVER):
            self._episode: _Served | _Local = _Served(where)
        else:
            self._episode = _Local(where, class_options or {})
        self._action_field = action_field or self._episode.only_field
        self._observation_field = observation_field
        self._columns = tuple(reset_columns)
        self._reward = 0.0
        self._done = False

    def reset(self, prompt: Any = "", **row: Any) -> str | None:
        """Begin an episode; the first observation is added to the prompt.

        Raises:
            QeRLError: The row lacks a column of ``reset_columns``, or the environment shows no such field.
        """
        lacking = [name for name in self._columns if name not in row]
        if lacking:
            raise QeRLError(
                f"reset_columns names {lacking[0]!r}, which no column of the task's rows is called; they are "
                f"called {', '.join(row) or 'prompt alone'}."
            )
        seed = row.get("seed")
        if not isinstance(seed, int):
            seed = derive_seed("openenv", json.dumps(prompt, sort_keys=True, default=str)) % 2**31
        self._reward = 0.0
        shown = self._take(self._episode.reset(seed, {name: row[name] for name in self._columns}))
        return shown or None

    def respond(self, text: str) -> str | None:
        """The observation after the action that the text states; None if the episode is over."""
        if self._done:
            return None
        try:
            shown = self._take(self._episode.step(self._action(text)))
        except _Refused as reason:
            return f"This action was not accepted: {reason}."
        return None if self._done else shown

    def close(self) -> None:
        """End the session with a server."""
        self._episode.close()

    def get_reward(self) -> float:
        """The sum of the rewards of this episode's steps."""
        return self._reward

    def _action(self, text: str) -> dict[str, Any]:
        if self._action_field:
            return {self._action_field: text.strip()}
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(action := json.loads(text), dict):
                return action
        raise _Refused("it is no JSON object")

    def _take(self, result: "_Result") -> str:
        """Count a result's reward, and return the text for the model."""
        observation, reward, self._done = result
        self._reward += float(reward or 0.0)
        if self._observation_field:
            if self._observation_field not in observation:
                raise QeRLError(
                    f"The environment's observation has no field {self._observation_field!r}; it has: "
                    f"{', '.join(observation) or 'none'}."
                )
            return str(observation[self._observation_field])
        told = {name: value for name, value in observation.items() if name not in _OF_THE_EPISODE}
        if len(told) == 1:
            return str(next(iter(told.values())))
        return json.dumps(told, default=str)


_Result = tuple[dict[str, Any], float | None, bool]
"""Fields of the observation, the reward of this step, and whether the episode is over."""


class _Refused(Exception):
    """The reason why the environment did not take an action."""


class _Local:
    """An environment in this process."""

    def __init__(self, where: str, options: Mapping[str, Any]) -> None:
        cls: Any = load_object(where, "environment", "class") if names_a_file(where) else _imported(where)
        try:
            self._environment = cls(**options)
        except TypeError as error:
            raise QeRLError(f"class_options do not fit {where}: {first_line(error)}; fix them.") from error
        hints = typing.get_type_hints(cls.step)
        self._action: type[BaseModel] | None = hints.get("action")
        if not (inspect.isclass(self._action) and issubclass(self._action, BaseModel)):
            raise QeRLError(
                f"{where} is no environment of OpenEnv: its method step(action) does not say of which type "
                "action is; annotate it with the class of its actions."
            )
        needed = [name for name, field in self._action.model_fields.items() if field.is_required()]
        self.only_field = needed[0] if len(needed) == 1 else None

    def reset(self, seed: int, columns: Mapping[str, Any]) -> _Result:
        return _fields(_with_known(self._environment.reset, {"seed": seed, **columns}))

    def step(self, fields: Mapping[str, Any]) -> _Result:
        assert self._action is not None
        try:
            action = self._action(**fields)
        except (ValidationError, TypeError) as error:
            raise _Refused(_reason(error)) from error
        return _fields(self._environment.step(action))

    def close(self) -> None:
        pass


class _Served:
    """A session with an environment behind a server."""

    only_field = None

    def __init__(self, url: str) -> None:
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise QeRLError(
                "Environments openenv:URL need the package openenv-core; run "
                f"`{how_to_install('openenv-core')}`."
            ) from error
        self._client = GenericEnvClient(base_url=url).sync()
        try:
            self._client.connect()
        except (OSError, TimeoutError) as error:
            raise QeRLError(
                f"The OpenEnv server {url} cannot be reached ({first_line(error)}); start it or fix the URL."
            ) from error

    def reset(self, seed: int, columns: Mapping[str, Any]) -> _Result:
        result = self._client.reset(seed=seed, **columns)
        return result.observation, result.reward, result.done

    def step(self, fields: Mapping[str, Any]) -> _Result:
        try:
            result = self._client.step(dict(fields))
        except RuntimeError as error:  # what the client makes of an error that the server reports
            raise _Refused(_reason(error)) from error
        return result.observation, result.reward, result.done

    def close(self) -> None:
        self._client.close()


def _fields(observation: Any) -> _Result:
    return observation.model_dump(), observation.reward, observation.done


def _with_known(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function with those keyword arguments that it takes, as OpenEnv's server does."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(**given)
    names = {parameter.name for parameter in parameters}
    return function(**{name: value for name, value in given.items() if name in names})


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return first_line(error)


def _imported(where: str) -> Any:
    """The class that ``module:Class`` names.

    Raises:
        QeRLError: The module cannot be imported, or has no such class.
    """
    module, separator, name = where.partition(":")
    if not separator:
        raise QeRLError(
            f"The environment openenv:{where} is neither a URL nor a class; write openenv:http://HOST:PORT, "
            "openenv:PATH.py:Class or openenv:MODULE:Class."
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise QeRLError(f"Module {module} cannot be imported: {first_line(error)}; install it.") from error
    if not inspect.isclass(found):
        raise QeRLError(f"The module {module} has no class {name!r}; fix environment: openenv:{where}.")
    return found
