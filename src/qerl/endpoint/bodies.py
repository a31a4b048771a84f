"""Request bodies in OpenAI's shapes, parsed and checked, and OpenAI's shape of errors.

Names are OpenAI's; `top_k`, `min_p` and `return_token_ids` are vLLM's additions. An unsupported field that
would change the answer is refused; any other unknown field is ignored, because each version of a client sends
more of them.

**Messages.** Clients send received messages back in varying forms: with a content that is null, missing or
split into parts; with ids of calls; with meaningless fields (`refusal`, `annotations`). `messages_of` brings
them into one form, in which equal messages compare equal and which chat templates take: content as text,
arguments of calls as objects, and the name of the tool in each tool's answer.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Message = dict[str, Any]
"""A message as chat templates take it: a role, a content, and possibly tool calls."""


class ApiError(Exception):
    """An error that the client receives in OpenAI's shape.

    Args:
        message: One sentence: what is wrong, where, what to do.
        status: HTTP status. Clients retry by themselves after 408, 409, 429 and 500 or above.
        param: The field at fault.
        code: The kind of error as a word for programs.
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        name = kind.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": name, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A request for continuations of a conversation or of a text.

    Attributes:
        model: Name of the policy.
        messages: Messages of a conversation, in the form of `messages_of`; empty for a text.
        tools: Tools as chat templates take them.
        prompt: A text, or token ids; None for a conversation.
        n: Number of continuations.
        max_tokens: Maximum number of tokens per continuation; None for all that there is room for.
        temperature, top_p, top_k, min_p: See `SamplingParams`; None if the client left them out.
        seed: The client's seed, or None.
        stop: Texts that end a continuation, and are not part of the answer.
        logprobs: Whether the answer has the log-probability of each token.
        stream: Whether the answer is streamed.
        include_usage: Whether the last event of a stream has the token counts.
        return_token_ids: Whether the answer has token ids.
        fingerprint: A hash that is equal for requests with the same continuations, in whichever form they
            are returned (`logprobs`, `stream`, `include_usage`, `return_token_ids`).
    """

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    fingerprint: str = ""

    @property
    def is_chat(self) -> bool:
        """True if the request continues a conversation."""
        return self.prompt is None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class _StreamOptions(_Body):
    include_usage: bool | None = False


class _Sampled(_Body):
    """The fields of both routes."""

    model: str
    n: int | None = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = False


class _Function(_Body):
    name: str
    arguments: str = "{}"


class _Call(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Part(_Body):
    type: str
    text: str | None = None


class _Said(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Chat(_Sampled):
    messages: list[_Said] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class _Completion(_Sampled):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)


_ABSENT: dict[str, tuple[Any, str]] = {
    "response_format": ({"type": "text"}, "nothing constrains what the policy writes"),
    "logit_bias": ({}, "logits are the policy's own"),
    "frequency_penalty": (0, "logits are the policy's own"),
    "presence_penalty": (0, "logits are the policy's own"),
    "functions": ([], "functions were replaced by tools"),
    "function_call": ("none", "functions were replaced by tools"),
    "modalities": (["text"], "the policy writes text"),
    "audio": (None, "the policy writes text"),
    "echo": (False, "the prompt is the client's already"),
    "suffix": ("", "the policy writes from left to right"),
    "best_of": (1, "nothing ranks continuations; ask for n of them"),
    "chat_template_kwargs": ({}, "the template's arguments are those of the run or server"),
}
"""Unsupported fields that would change the answer: the value accepted besides null, and why no other is."""


def read_chat(body: bytes) -> Asked:
    """Parse a request for chat completions.

    Raises:
        ApiError: The body is invalid, or asks for something unsupported.
    """
    read = _read(_Chat, body)
    if read.top_logprobs:
        raise ApiError(
            "top_logprobs is not supported, because the engine keeps only the log-probability of the "
            "sampled token; leave it out or set it to 0.",
            param="top_logprobs",
        )
    if read.tool_choice not in (None, "auto", "none"):
        raise ApiError(
            "tool_choice cannot force a call, because the policy samples without constraints; set it to "
            "auto or none.",
            param="tool_choice",
        )
    for at, tool in enumerate(read.tools or ()):
        if tool.get("type") != "function" or not isinstance(tool.get("function", {}).get("name"), str):
            raise ApiError(
                f"tools.{at} is no function with a name; give each tool as {{type: function, function: "
                "{name: ..., parameters: ...}}.",
                param="tools",
            )
    messages = messages_of(read.messages)
    if messages[-1]["role"] == "assistant":
        raise ApiError(
            "The last message has the role assistant, so there is nothing to reply to; end with a message "
            "of the user or of a tool.",
            param="messages",
        )
    tools = () if read.tool_choice == "none" else tuple(read.tools or ())
    return _asked(
        read,
        messages=messages,
        tools=tools,
        max_tokens=read.max_completion_tokens or read.max_tokens,
        logprobs=bool(read.logprobs),
    )


def read_completion(body: bytes) -> Asked:
    """Parse a request for completions of a text or of token ids.

    Raises:
        ApiError: The body is invalid, or asks for something unsupported.
    """
    read = _read(_Completion, body)
    if read.logprobs:
        raise ApiError(
            f"logprobs is {read.logprobs}, but the engine keeps only the log-probability of the sampled "
            "token; set it to 0 to get that.",
            param="logprobs",
        )
    prompt: Any = read.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(
                f"prompt has {len(prompt)} texts; send one request for each (concurrent requests are "
                "sampled together).",
                param="prompt",
            )
        (prompt,) = prompt
    if not prompt or (isinstance(prompt, list) and min(prompt) < 0):
        raise ApiError("prompt is empty or has a negative id; give at least one token.", param="prompt")
    return _asked(
        read,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        max_tokens=16 if read.max_tokens is None else read.max_tokens,
        logprobs=read.logprobs is not None,
    )


def read_reward(body: bytes) -> float:
    """Parse the reward that a client gives its trajectory.

    Raises:
        ApiError: The reward is no finite number.
    """
    return float(_read(_Reward, body).reward)


class _Reward(_Body):
    reward: float = Field(allow_inf_nan=False)


def _read(kind: type[Any], body: bytes) -> Any:
    """Parse a body, and raise for unsupported fields."""
    try:
        read = kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise ApiError(f"The body is not JSON ({first['msg'].removeprefix('Invalid JSON: ')}).") from None
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ApiError(
            f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}.",
            param=str(first["loc"][0]) if first["loc"] else None,
        ) from None
    found = read.model_extra or {}
    for name, (harmless, why) in _ABSENT.items():
        if found.get(name) not in (None, harmless):
            raise ApiError(f"{name} is not supported: {why}; leave it out.", param=name)
    return read


def _asked(read: Any, **own: Any) -> Asked:
    stop = [read.stop] if isinstance(read.stop, str) else read.stop or []
    if len(stop) > 16 or not all(stop):
        raise ApiError(
            "stop has an empty text, or more than 16 texts; give at most 16, none of them empty.",
            param="stop",
        )
    values: dict[str, Any] = {
        "model": read.model,
        "n": read.n or 1,
        "temperature": read.temperature,
        "top_p": read.top_p,
        "top_k": None if read.top_k is None else max(read.top_k, 0),
        "min_p": read.min_p,
        "seed": read.seed,
        "stop": tuple(stop),
        **own,
    }
    sent: dict[str, Any] = {
        "stream": bool(read.stream),
        "include_usage": bool(read.stream_options and read.stream_options.include_usage),
        "return_token_ids": bool(read.return_token_ids),
    }
    drawn = {name: value for name, value in values.items() if name != "logprobs"}
    text = json.dumps(drawn, sort_keys=True)
    mark = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Asked(**values, **sent, fingerprint=mark)


def messages_of(said: Sequence[_Said]) -> tuple[Message, ...]:
    """Bring the messages of a client into one form; see the head of this module.

    Raises:
        ApiError: A content has a part that is no text.
    """
    names: dict[str, str] = {}
    found = []
    for at, each in enumerate(said):
        message: Message = {"role": "system" if each.role == "developer" else each.role}
        message["content"] = _text(each.content, at)
        if each.role == "assistant" and each.tool_calls:
            names |= {call.id: call.function.name for call in each.tool_calls if call.id}
            message["tool_calls"] = [
                call_of(call.function.name, call.function.arguments) for call in each.tool_calls
            ]
        if each.role == "tool":
            message["name"] = each.name or names.get(each.tool_call_id or "", "")
        found.append(message)
    return tuple(found)


def call_of(name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call as chat templates take it; arguments that are no JSON object stay text."""
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = None
        arguments = read if isinstance(read, dict) else arguments
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: str | list[_Part] | None, at: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise ApiError(
                f"messages.{at}.content has a part of type {part.type!r}, but the policy reads only text.",
                param="messages",
            )
    return "".join(part.text or "" for part in content)
