"""Response bodies in OpenAI's shapes, whole or streamed.

The text drawn so far may end in the middle of a character or of a stop text; such an end is held back until
it is complete. Tool calls are parsed from the whole turn, so a stream with tools has one chunk of text, as
has one with log-probabilities or token ids.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qerl.endpoint.bodies import Asked
from qerl.endpoint.reply import Choice, Outcome

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, without special tokens."""

_HALF = "\ufffd"


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first stop text in it."""
    found = [place for each in stop if (place := text.find(each)) >= 0]
    return text[: min(found)] if found else text


class Answers:
    """The response to one request, whole or as events of a stream.

    Args:
        asked: The request.
        name, created: Attributes of the `Reply`.
        decode: Decodes tokens of the policy.
    """

    def __init__(self, asked: Asked, name: str, created: int, decode: Decode) -> None:
        self._asked, self._decode = asked, decode
        self._kind = "chat.completion" if asked.is_chat else "text_completion"
        prefix = "chatcmpl" if asked.is_chat else "cmpl"
        self._common: dict[str, Any] = {
            "id": f"{prefix}-{name}",
            "created": created,
            "model": asked.model,
        }
        self._sent = [""] * asked.n

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choices = [self._choice(at, each) for at, each in enumerate(outcome.choices)]
        if self._asked.return_token_ids:
            ids = {"prompt_token_ids": outcome.prompt_ids}
        else:
            ids = {}
        return self._common | {"object": self._kind, "choices": choices, "usage": _usage(outcome)} | ids

    def first(self) -> Iterator[bytes]:
        """Yield the first events of a stream."""
        if self._asked.is_chat:
            for at in range(self._asked.n):
                yield self._event(at, {"role": "assistant", "content": ""})

    def more(self, drawn: Sequence[Sequence[int]]) -> Iterator[bytes]:
        """Yield events with the text drawn since the last call.

        Args:
            drawn: All tokens of each continuation so far.
        """
        asked = self._asked
        if asked.tools or asked.logprobs or asked.return_token_ids:
            return
        for at, ids in enumerate(drawn):
            text = self._decode(ids)
            held = text.endswith(_HALF) or any(each in text for each in asked.stop)
            ready = "" if held else text[: len(text) - _overlap(text, asked.stop)]
            if len(ready) > len(self._sent[at]):
                yield self._text_event(at, ready[len(self._sent[at]) :])
                self._sent[at] = ready

    def last(self, outcome: Outcome) -> Iterator[bytes]:
        """Yield the last events of a stream."""
        for at, choice in enumerate(outcome.choices):
            found = self._choice(at, choice)
            extra = {name: found[name] for name in ("logprobs", "token_ids") if found.get(name) is not None}
            if self._asked.is_chat:
                delta = {name: value for name, value in found["message"].items() if name != "role"}
                delta["content"] = (delta["content"] or "")[len(self._sent[at]) :]
                calls = delta.pop("tool_calls", None)
                if calls:
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                if any(delta.values()) or extra:
                    yield self._event(at, delta, **extra)
                yield self._event(at, {}, finish_reason=choice.finish_reason)
            else:
                rest = found["text"][len(self._sent[at]) :]
                yield self._text_event(at, rest, finish_reason=choice.finish_reason, **extra)
        if self._asked.include_usage:
            yield event_of(self._chunk([]) | {"usage": _usage(outcome)})
        yield b"data: [DONE]\n\n"

    def _choice(self, at: int, choice: Choice) -> dict[str, Any]:
        asked, found = self._asked, dict[str, Any](index=at, finish_reason=choice.finish_reason)
        if asked.is_chat:
            found["message"] = _message(self._common["id"], at, choice)
        else:
            found["text"] = choice.message["text"]
        found["logprobs"] = self._logprobs(choice) if asked.logprobs else None
        if asked.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the log-probabilities of all drawn tokens; a single token may be part of a character."""
        texts = [self._decode([token]) for token in choice.token_ids]
        if self._asked.is_chat:
            content = [
                {"token": text, "bytes": list(text.encode()), "logprob": value, "top_logprobs": []}
                for text, value in zip(texts, choice.logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets, at = [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _text_event(self, at: int, text: str, finish_reason: str | None = None, **extra: Any) -> bytes:
        if self._asked.is_chat:
            return self._event(at, {"content": text}, finish_reason, **extra)
        choice = {"index": at, "text": text, "finish_reason": finish_reason, "logprobs": None, **extra}
        return event_of(self._chunk([choice]))

    def _event(self, at: int, delta: Any, finish_reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": at, "delta": delta, "finish_reason": finish_reason, **extra}
        return event_of(self._chunk([choice]))

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.is_chat else self._kind
        return self._common | {"object": kind, "choices": choices}


def _message(name: str, at: int, choice: Choice) -> dict[str, Any]:
    """Convert a message for clients: arguments of calls as JSON text, each call with an id."""
    message = dict(choice.message)
    calls = message.pop("tool_calls", None)
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": f"call_{name.partition('-')[2]}_{at}_{number}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _as_json(call["function"]["arguments"]),
                },
            }
            for number, call in enumerate(calls)
        ]
    return message


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _usage(outcome: Outcome) -> dict[str, int]:
    drawn = sum(len(choice.token_ids) for choice in outcome.choices)
    read = len(outcome.prompt_ids)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of a text with which a stop text may begin."""
    return max(
        (size for each in stop for size in range(1, len(each)) if text.endswith(each[:size])), default=0
    )


def event_of(body: dict[str, Any]) -> bytes:
    """Return a body as an event of a stream."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"
