"""Turns as a chat template renders them: the policy's text as a message, the others' messages as tokens.

Tokens of the policy are never rendered again. The tokens between one of its turns and the next, others'
messages with the template's own marks around them, are what the template writes of a short made-up
conversation with those messages at its end, less what it writes of the conversation without them. That needs
a template that writes a message the same whatever follows; where a model's own does not, the version of it
that TRL ships for training takes its place.

transformers finds calls of tools in the policy's text, by a description of the template that the tokenizer
has or TRL knows. TRL's functions for both are used as they are, so that a model trained here speaks as one
trained there.
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
    """Refuse a model that cannot be told of tools.

    Raises:
        QeRLError: Its chat template writes no tools and calls, or the form of its calls is unknown.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    if tokenizer.chat_template is None or not supports_tool_calling(tokenizer):
        raise QeRLError(
            f"The chat template of {name} has no tools; use a model whose template has them, or an "
            "environment with respond(text), which needs none."
        )
    try:
        _describe(tokenizer)
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        raise QeRLError(
            f"Calls of tools cannot be found in what {name} writes ({first_line(error)}); set "
            "response_template on its tokenizer, or use an environment with respond(text)."
        ) from error


def _describe(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer TRL's description of its calls, if it has none."""
    if not any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
        add_response_schema(tokenizer)


class TurnTemplate:
    """The chat template of a tokenizer in a conversation of several turns.

    Args:
        tokenizer: With a chat template.
        template_kwargs: The template's own arguments.
        tools: True if there are any; then the template must have them.

    Attributes:
        chat_template: Replaces the tokenizer's own template; None keeps that.

    Raises:
        QeRLError: As `check_template`, with tools; or no template is known that writes a turn alike whatever
            follows.
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
            with contextlib.suppress(ValueError):  # no version of it is known
                self.chat_template = get_training_chat_template(tokenizer)
            self.suffix_ids(_ANSWER)

    def _goes_on(self) -> bool:
        """True if a turn stays as it is when a user answers it."""
        try:
            self.suffix_ids(_ANSWER)
        except QeRLError:
            return False
        return True

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Tokens of a prompt that tells of these tools, functions or their JSON schemas, the assistant's turn
        opened."""
        return self._ids(messages, add_generation_prompt=True, tools=list(tools) or None)

    def text(self, token_ids: Sequence[int]) -> str:
        """The policy's text, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def parse(self, token_ids: Sequence[int], prefix_ids: Sequence[int], tools: Sequence[Any]) -> Message:
        """The policy's text as a message, its calls of tools under `tool_calls`.

        Args:
            token_ids: The turn.
            prefix_ids: All tokens before it.
            tools: Those in the prompt.
        """
        try:
            ids, prefix = list(token_ids), list(prefix_ids)
            return whole(parse_response(self._tokenizer, ids, prefix=prefix, tools=list(tools)))
        except Exception:  # a parser meets whatever a policy may write; TRL reads it as text then
            return {"role": "assistant", "content": self.text(token_ids)}

    def suffix_ids(self, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """Tokens between the end of the policy's turn and its next one: these messages, and its turn opened.

        Args:
            messages: Of the others.
            last: The turn's last token, where it may be another than the template's, which then is written as
                well; None where the policy always draws the template's.

        Raises:
            QeRLError: The template writes the turn before them otherwise if they follow.
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
        # The turn ends with its stop token, which the policy drew; what the template writes behind it is new.
        stop = self._tokenizer.eos_token_id
        ends = [place for place, token in enumerate(prefix) if token == stop]
        if ends:
            prefix = prefix[: ends[-1] + (last is None or last == stop)]
        if whole[: len(prefix)] != prefix:
            name = self._tokenizer.name_or_path or "the tokenizer"
            raise QeRLError(
                f"The chat template of {name} writes a turn otherwise once another follows, so a "
                "conversation cannot go on token by token; fix the template (chat_template.jinja beside the "
                "model)."
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
