"""Environments of OpenEnv behind a running server (``environment: openenv:URL``), by openenv-core's client.

An episode is `reset` and `step` calls whose actions and observations have fields. The model's text becomes an
action: the value of one field, or a JSON object with all of them. The model reads one field of the
observation, or a JSON object of those that are not about the episode itself.

An action that the environment does not accept costs a turn and is answered with the reason, so the model can
write a better one. The reward is the sum over the steps. A server has one session per trajectory and has to
allow as many at the same time as a rollout has samples (``max_concurrent_envs``).

Given up: environments whose tools are called through MCP, and images in observations. A class of OpenEnv runs
behind the package's own server, not in this process.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from qerl.errors import QeRLError, first_line
from qerl.kernels.needs import how_to_install
from qerl.seeding import derive_seed

_OF_THE_EPISODE = frozenset({"done", "reward", "metadata"})


class OpenEnv:
    """An environment of OpenEnv as a text environment.

    Args:
        url: URL of the server.
        action_field: The field of an action that takes the model's text; None expects a JSON object.
        observation_field: The field of an observation that the model reads. By default the only one, else all
            of them as JSON.
        reset_columns: Columns of the row that `reset` is given, besides ``seed``. The seed is the row's
            column of that name, or follows from its prompt, so that all samples of a group meet the same
            episode.

    Raises:
        QeRLError: The package is missing, or the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        action_field: str | None = None,
        observation_field: str | None = None,
        reset_columns: Sequence[str] = (),
    ) -> None:
        self._client = _connected(url)
        self._action_field = action_field
        self._observation_field = observation_field
        self._columns = tuple(reset_columns)
        self._reward = 0.0
        self._done = False

    def reset(self, prompt: Any = "", **row: Any) -> str | None:
        """Begin an episode; the first observation is added to the prompt.

        Raises:
            QeRLError: The row lacks a column of ``reset_columns``, or the observation its field.
        """
        lacking = [name for name in self._columns if name not in row]
        if lacking:
            raise QeRLError(
                f"reset_columns names {lacking[0]!r}, but the task's rows have no such column; their "
                f"columns are: {', '.join(row) or 'prompt alone'}."
            )
        seed = row.get("seed")
        if not isinstance(seed, int):
            seed = derive_seed("openenv", json.dumps(prompt, sort_keys=True, default=str)) % 2**31
        self._reward = 0.0
        columns = {name: row[name] for name in self._columns}
        shown = self._take(self._client.reset(seed=seed, **columns))
        return shown or None

    def respond(self, text: str) -> str | None:
        """Return the observation after the text's action, or why it was refused; None ends the episode."""
        if self._done:
            return None
        action = self._action(text)
        if action is None:
            return "This action was not accepted: it is no JSON object."
        try:
            shown = self._take(self._client.step(action))
        except RuntimeError as error:  # what the client makes of an error that the server reports
            return f"This action was not accepted: {first_line(error)}."
        return None if self._done else shown

    def close(self) -> None:
        """End the session with a server."""
        self._client.close()

    def get_reward(self) -> float:
        """The sum of the rewards of this episode's steps."""
        return self._reward

    def _action(self, text: str) -> dict[str, Any] | None:
        if self._action_field:
            return {self._action_field: text.strip()}
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(action := json.loads(text), dict):
                return action
        return None

    def _take(self, result: Any) -> str:
        """Count a result's reward, and return the text for the model."""
        observation, self._done = result.observation, result.done
        self._reward += float(result.reward or 0.0)
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


def _connected(url: str) -> Any:
    """Open a session with the environment behind a server."""
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise QeRLError(
            f"The environment openenv:{url} is no URL; serve the class by openenv-core and write "
            "openenv:http://HOST:PORT."
        )
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise QeRLError(
            f"Environments openenv:URL need the package openenv-core; run `{how_to_install('openenv-core')}`."
        ) from error
    client = GenericEnvClient(base_url=url).sync()
    try:
        client.connect()
    except (OSError, TimeoutError) as error:
        raise QeRLError(
            f"The OpenEnv server {url} cannot be reached ({first_line(error)}); start it or fix the URL."
        ) from error
    return client
