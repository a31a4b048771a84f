"""Chat templates in conversations of several turns: parsing the policy's turns, rendering other messages.

Tokens of the policy are never rendered again. The tokens between two of its turns are the other messages with
the template's markup around them. They are computed as a difference: a short made-up conversation is rendered
with those messages at its end and without them, and the second rendering is cut off the start of the first.
This needs a template that is prefix-preserving, that is, renders a message the same whatever follows; if a
model's own is not, the version of it that TRL ships for training is used.

transformers parses tool calls in the policy's text, by a response schema that the tokenizer has or TRL knows.
TRL's functions for both are used unchanged, so that a model trained here uses the same format as one trained
with TRL.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from qerl.agents.text import whole
from qerl.agents.trajectory import Message
from qerl.errors import QeRLError, first_line

_ANSWER: list[Message] = [{"role": "user", "content": "dummy"}]


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if a model's chat template does not support tools.

    Raises:
        QeRLError: The template renders no tools and calls, or the format of its calls is unknown.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    if tokenizer.chat_template is None or not supports_tool_calling(tokenizer):
        raise QeRLError(
            f"The chat template of {name} does not support tools; use a model whose template does, or an "
            "environment with respond(text), which needs none."
        )
    try:
        _describe(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        raise QeRLError(
            f"Tool calls cannot be parsed from the output of {name} ({first_line(error)}); set "
            "response_template on its tokenizer, or use an environment with respond(text)."
        ) from error


def _describe(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add TRL's response schema to a tokenizer that has none."""
    if not any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
        add_response_schema(tokenizer)


class TurnTemplate:
    """The chat template of a tokenizer in conversations of several turns.

    Args:
        tokenizer: A tokenizer with a chat template.
        template_kwargs: The template's own arguments.
        tools: True if there are tools; the template must then support them.

    Attributes:
        chat_template: Replaces the tokenizer's own template; None keeps that.

    Raises:
        QeRLError: With tools, see `check_template`; otherwise, no prefix-preserving template is known.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self.chat_template: str | None = None
        if tools:
            check_template(tokenizer)
            if not is_chat_template_prefix_preserving(tokenizer):
                self.chat_template = get_training_chat_template(tokenizer)
        elif not self._goes_on():
            with contextlib.suppress(ValueError):  # TRL has no version of it
                self.chat_template = get_training_chat_template(tokenizer)
            self.suffix_ids(_ANSWER)

    def _goes_on(self) -> bool:
        """Return True if a turn is rendered the same whether or not a user answers it."""
        try:
            self.suffix_ids(_ANSWER)
        except QeRLError:
            return False
        return True

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Tokenize a prompt with its tools (functions or JSON schemas), up to the start of the assistant's
        turn."""
        return self._ids(messages, add_generation_prompt=True, tools=list(tools) or None)

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode the policy's tokens, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def parse(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Message:
        """Parse a turn of the policy into a message, with tool calls under `tool_calls`.

        Args:
            token_ids: Tokens of the turn.
            prefix_ids: All tokens before the turn.
            tools: Tools in the prompt.
        """
        try:
            ids, prefix = list(token_ids), list(prefix_ids)
            return whole(parse_response(self._tokenizer, ids, prefix=prefix, tools=list(tools)))
        except Exception:  # a policy may write anything; like TRL, take what does not parse as text
            return {"role": "assistant", "content": self.text(token_ids)}

    def suffix_ids(self, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """Return the tokens between two turns of the policy: these messages, and the start of its next turn.

        Args:
            messages: The messages between the two turns.
            last: Last token of the first turn. If it is not the template's stop token, that token is returned
                too. None if the policy always draws the stop token.

        Raises:
            QeRLError: The template renders the first turn differently if these messages follow.
        """
        before: list[Message] = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": ""},
        ]
        if messages[0]["role"] == "tool":  # some templates name the tool by the call
            function = {"name": messages[0]["name"], "arguments": {}}
            before[1]["tool_calls"] = [{"type": "function", "function": function}]
        prefix = self._ids(before, add_generation_prompt=False)
        whole = self._ids([*before, *messages], add_generation_prompt=True)
        # The turn ends with its stop token, which the policy drew; what the template writes after it is new.
        stop = self._tokenizer.eos_token_id
        ends = [place for place, token in enumerate(prefix) if token == stop]
        if ends:
            prefix = prefix[: ends[-1] + (last is None or last == stop)]
        if whole[: len(prefix)] != prefix:
            name = self._tokenizer.name_or_path or "the tokenizer"
            raise QeRLError(
                f"The chat template of {name} changes the tokens of a turn once another follows, so a "
                "conversation cannot continue from its tokens; fix the template (chat_template.jinja beside "
                "the model)."
            )
        return whole[len(prefix) :]

    def _ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.chat_template,
            tokenize=True,
            return_dict=False,
            **options,
            **self._kwargs,
        )
