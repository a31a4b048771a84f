"""Conversion between OpenAI's chat API and tokens: requests to prompts, completions to answers.

`qerl.endpoint` knows which messages the policy drew; this module renders the others with the policy's chat
template, and parses text and tool calls from completions (`qerl.agents.template`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.agents.template import TurnTemplate
from qerl.agents.trajectory import Message
from qerl.endpoint.answers import cut_at
from qerl.endpoint.bodies import ApiError, Asked, call_of
from qerl.endpoint.history import History, Place, Template
from qerl.endpoint.reply import Choice
from qerl.endpoint.reply import FinishReason as Reason
from qerl.errors import QeRLError, first_line
from qerl.rollout.engine import Completion


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode token ids to text, without special tokens."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class _Once:
    """A template that caches rendered prompts, because the samples of a group share theirs."""

    template: Template
    prompts: dict[str, list[int]]

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """See `Template.prompt_ids`."""
        key = json.dumps([messages, tools], sort_keys=True)
        if key not in self.prompts:
            self.prompts[key] = self.template.prompt_ids(messages, tools)
        return self.prompts[key]

    def suffix_ids(self, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """See `Template.suffix_ids`."""
        return self.template.suffix_ids(messages, last)


class Templates:
    """The chat template with tools and the one without, each made on first use.

    Args:
        tokenizer: The policy's tokenizer, with a chat template.
        template_kwargs: The template's own arguments.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None) -> None:
        self._tokenizer, self._kwargs = tokenizer, template_kwargs
        self._made: dict[bool, TurnTemplate] = {}

    def of(self, tools: bool) -> TurnTemplate:
        """Return the template with or without tools.

        Raises:
            QeRLError: The template does not support tools, or cannot continue a conversation.
        """
        if tools not in self._made:
            self._made[tools] = TurnTemplate(self._tokenizer, self._kwargs, tools=tools)
        return self._made[tools]

    def place(self, asked: Asked, history: History, prompts: dict[str, list[int]] | None = None) -> Place:
        """Return the place in the history at which a request continues.

        Args:
            asked: The request.
            history: History of the request's trajectory.
            prompts: Cache of rendered prompts, which is filled; None for no cache.

        Raises:
            ApiError: The template refuses the request's messages or tools.
        """
        if not asked.is_chat:
            assert asked.prompt is not None
            return history.place_of_text(asked.prompt, self._encode)
        try:
            template: Template = self.of(bool(asked.tools))
            if prompts is not None:
                template = _Once(template, prompts)
            return history.place(asked.messages, asked.tools, template)
        except QeRLError as error:
            raise ApiError(str(error), param="tools" if asked.tools else "messages") from error
        except Exception as error:  # templates raise their own, such as for an unexpected order of roles
            raise ApiError(
                f"The chat template does not take these messages ({first_line(error)}); send others.",
                param="messages",
            ) from error

    def choice(self, asked: Asked, before: Sequence[int], drawn: Completion, ends: bool) -> Choice:
        """Convert a continuation to the form that its client receives.

        Args:
            asked: The request.
            before: All tokens before the continuation.
            drawn: The continuation.
            ends: Whether the continuation ended with a stop token.
        """
        reason: Reason = "length" if drawn.finish_reason == "length" else "stop"
        text = cut_at(decoded(self._tokenizer, drawn.token_ids), asked.stop)
        message: Message = {"role": "assistant", "content": text}
        if not asked.is_chat:
            message = {"text": text, "over": ends}
        elif asked.tools and reason == "stop":
            parsed = self.of(True).parse(drawn.token_ids, before, list(asked.tools))
            calls = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
            message["content"] = cut_at(parsed.get("content") or "", asked.stop)
            thoughts = parsed.get("reasoning_content") or parsed.get("thinking")
            if thoughts:
                message["reasoning_content"] = thoughts
            if calls:
                message["tool_calls"] = [call_of(call["name"], call["arguments"]) for call in calls]
                reason = "tool_calls"
        return Choice(message, drawn.token_ids, drawn.logprobs, reason)

    def _encode(self, text: str, first: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=first)
