"""Environment adapters: how the policy's turns are parsed, and how tools and environments answer them.

A world belongs to one trajectory. The loop uses it, in the loop's thread, to parse a turn of the policy into
a message and calls (`read`), to turn answers into messages (`reply`), and to tokenize those
(`TurnTemplate`). The pool makes the calls in between.
"""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.agents.environment import is_text, tool_names
from qerl.agents.pool import Answer, Call
from qerl.agents.template import TurnTemplate
from qerl.agents.tools import Tool, tool_name
from qerl.agents.trajectory import Message


class World(ABC):
    """The tools and environment that answer the policy in one trajectory.

    Args:
        template: Renders and parses turns.
        environment: The trajectory's environment, already reset; None if there are only tools.

    Attributes:
        hangs: True if a timed-out call still runs, so that its environment must not be used again.
        hears_last_turn: True if the last turn under a turn limit is still passed to the environment, without
            an answer to the policy: a text environment must see it, a tool call is useless without an answer.
    """

    hears_last_turn = False

    def __init__(self, template: TurnTemplate, environment: Any = None) -> None:
        self.template, self.environment = template, environment
        self.hangs = False

    @abstractmethod
    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int]) -> tuple[Message, list[Call]]:
        """Parse the policy's turn into a message and its calls; a turn without calls ends the trajectory.

        Args:
            token_ids: Tokens of the turn.
            prefix_ids: All tokens before the turn, including the prompt.
        """

    @abstractmethod
    def reply(self, answers: Sequence[Answer]) -> list[Message] | None:
        """Return the answers as messages to the policy, or None to end the trajectory."""


class ToolWorld(World):
    """Tools and environment methods, called in the format of the model's chat template.

    Args:
        template, environment: See `World`.
        tools: Functions besides the environment's methods.
    """

    def __init__(self, template: TurnTemplate, tools: Sequence[Tool] = (), environment: Any = None) -> None:
        super().__init__(template, environment)
        methods = [getattr(environment, name) for name in tool_names(environment)]
        self.tools = [*tools, *methods]
        self._by_name: Mapping[str, Tool] = {tool_name(tool): tool for tool in self.tools}

    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int]) -> tuple[Message, list[Call]]:
        message = self.template.parse(token_ids, prefix_ids, self.tools)
        return message, [self._call(call) for call in message.get("tool_calls") or ()]

    def reply(self, answers: Sequence[Answer]) -> list[Message] | None:
        return [{"role": "tool", "name": answer.name, "content": str(answer.text)} for answer in answers]

    def _call(self, call: Mapping[str, Any]) -> Call:
        function = call.get("function", call)
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):  # some templates leave them as JSON
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        if name not in self._by_name:
            return Call(name, None, error=f"Tool {name} not found.")
        if not isinstance(arguments, dict):
            return Call(name, None, error=f"The arguments of {name} are not given by name.")
        return Call(name, self._by_name[name], arguments)


class SilentWorld(World):
    """A world that never answers: a trajectory is one turn, whose thinking block may be closed for it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self.environment, self.hangs = tokenizer, None, False

    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int]) -> tuple[Message, list[Call]]:
        return {
            "role": "assistant",
            "content": self._tokenizer.decode(list(token_ids), skip_special_tokens=True),
        }, []

    def reply(self, answers: Sequence[Answer]) -> list[Message] | None:
        return None


class TextWorld(World):
    """A text environment, which answers every turn of the policy in a user's turn."""

    hears_last_turn = True

    def read(self, token_ids: Sequence[int], prefix_ids: Sequence[int]) -> tuple[Message, list[Call]]:
        text = self.template.text(token_ids)
        message = {"role": "assistant", "content": text}
        return message, [Call("respond", self.environment.respond, {"text": text})]

    def reply(self, answers: Sequence[Answer]) -> list[Message] | None:
        (answer,) = answers
        return None if answer.text is None else [{"role": "user", "content": answer.text}]


def world_of(template: TurnTemplate, tools: Sequence[Tool], environment: Any) -> World:
    """Return the world of a trajectory with these tools and this environment; either may be missing."""
    if is_text(environment):
        return TextWorld(template, environment)
    return ToolWorld(template, tools, environment)
