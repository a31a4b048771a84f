"""A reward from another model: a judge behind any endpoint that speaks OpenAI's chat completions.

The judge reads the problem, the completion and the right answer in a prompt template, and ends its reply with
a score, which a regular expression extracts. A few requests run at the same time; after a temporary failure
(429, 5xx, a connection that breaks, a reply that is no JSON) the request is sent again, with a pause that
doubles each time, within one time limit per completion. Replies can be kept on disk, so that a resumed run or
a repeated evaluation pays for no reply twice.

A completion without a score has no reward, instead of a reward of 0: the completion is not to blame. It
counts in ``rewards/judge/failed``, and a step in which there is no score at all ends the run unless
``reward_errors: tolerate`` is set (:mod:`qerl.trainer.rewards`).

The HTTP client is that of huggingface_hub, which is required anyway. Given up: a policy is trained for
everything that the judge rewards, flattery and orders included; read some of the rewarded completions.
"""

import asyncio
import base64
import inspect
import json
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub.utils import httpx  # its HTTP client, whose name differs by version

from qerl.errors import QeRLError, first_line
from qerl.rewards.replies import Replies
from qerl.rewards.text import Completion, Message, completion_text

PROMPT = """\
Here is a problem, the right answer where one is known, and a reply to judge.

Problem:
{prompt}

Right answer: {answer}

Reply:
{completion}

How good is the reply, from 0 (wrong or useless) to 10 (right and clear)? Give your reasons in a few
sentences and end with a line of the form "Score: 7".
"""
"""The default request to the judge."""

SCORE = r"[Ss]core:[^\w.+\u2212-]*([+\u2212-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
"""The default pattern of its score: a number, sign and exponent optional, after "Score:" and markup alone."""

_PLACES = re.compile(r"\{(prompt|completion|answer)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
_MAX_BYTES = 16 * 2**20  # of a reply; what a server sends beyond it is not read


class Judge:
    """A reward function that asks a model; an instance is handed to a trainer as any other function.

    Args:
        url: URL of the endpoint including its version: ``http://127.0.0.1:8000/v1``. A user and a password in
            it are sent, and appear in no message and in no kept reply.
        model: Name of the judge at the endpoint.
        prompt: The request, with the placeholders {prompt}, {completion} and {answer} (the column; empty
            without one).
        score: Regular expression whose only group is the score; its last match counts.
        scores: Lowest and highest score, which become rewards of 0 and 1; a score outside them is an error.
        api_key_env: Name of the environment variable with the key; None sends no key.
        request: Further fields of a request, such as ``max_tokens``; `temperature` is 0 unless it is here.
        at_once: Number of concurrent requests.
        tries: Maximum number of requests per completion.
        timeout: Seconds per completion, from its first request on, including pauses and further requests.
        cache: Folder of kept replies; None keeps none.
        name: The name in logs.

    Raises:
        QeRLError: An argument is wrong, or the environment has no such variable.
    """

    judges_alone = judges_outside = True  # see qerl.tasks.guard

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str = PROMPT,
        score: str = SCORE,
        scores: Sequence[float] = (0, 10),
        api_key_env: str | None = None,
        request: Mapping[str, Any] | None = None,
        at_once: int = 8,
        tries: int = 4,
        timeout: float = 60.0,
        cache: str | Path | None = None,
        name: str = "judge",
    ) -> None:
        texts = {"url": url, "model": model, "prompt": prompt, "score": score, "name": name}
        for what, text in texts.items():
            if not isinstance(text, str) or not text.strip():
                raise QeRLError(f"{what} of the judge is {text!r}; it must be text.")
        if not url.startswith(("http://", "https://")):
            shown = url.rpartition("@")[2]
            raise QeRLError(f"url of the judge is {shown!r}; it must begin with http:// or https://.")
        self._url = url.rstrip("/")
        self._place, passwords = _without_user(self._url)
        if "{completion}" not in prompt:
            raise QeRLError(
                "prompt of the judge lacks the placeholder {completion} for the reply to judge; add it."
            )
        if request is not None and not isinstance(request, Mapping):
            raise QeRLError(f"request of the judge is {request!r}; it must be a mapping.")
        self.__name__ = name
        self._prompt = prompt
        self._score = _pattern(score)
        self._lowest, self._highest = _ends(scores)
        self._fields = _as_json({"temperature": 0, **(request or {}), "model": model})
        key = _key(api_key_env)
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._secrets = [secret for secret in (key, *passwords) if secret]
        self._at_once = int(_number("at_once", at_once, 1))
        self._tries = int(_number("tries", tries, 1))
        self._timeout = _number("timeout", timeout, 0.01)
        self._replies = None if cache is None else Replies(Path(cache).expanduser())
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(
        self, prompts: list, completions: list[Completion], answer: list | None = None, **_: Any
    ) -> list[float]:
        """Return one reward per completion, 0 to 1; the arguments are TRL's.

        Raises:
            ConnectionError: The judge cannot be reached, or answers something other than a completion.
            TimeoutError: It took too long.
            ValueError: It refused the request, or its reply has no score.
        """
        self._bind()
        triples = zip(prompts, completions, answer or [""] * len(completions), strict=True)
        return list(await asyncio.gather(*(self._reward(*triple) for triple in triples)))

    def _bind(self) -> None:
        """Create connections and slots for the running event loop, to which they are bound."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self._at_once)
            limit = httpx.Timeout(None, connect=min(10.0, self._timeout))  # the whole has its own
            self._client = httpx.AsyncClient(headers=self._headers, timeout=limit)

    async def _reward(self, prompt: str | list[Message], completion: Completion, answer: Any) -> float:
        texts = {"prompt": _problem(prompt), "completion": completion_text(completion), "answer": str(answer)}
        asked = _PLACES.sub(lambda place: texts[place[1]], self._prompt)
        body = {**self._fields, "messages": [{"role": "user", "content": asked}]}
        kept = self._replies.get(self._place, body) if self._replies is not None else None
        if kept is not None:
            return self._read(kept)
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout):
                    reply = await self._ask(body)
            except TimeoutError:
                raise TimeoutError(
                    f"the judge at {self._place} gave no reply within {self._timeout:g} s"
                ) from None
        reward = self._read(reply)
        if self._replies is not None:
            self._replies.put(self._place, body, reply)
        return reward

    async def _ask(self, body: dict[str, Any]) -> str:
        """The judge's reply; after a temporary failure the request is sent again."""
        pause = 0.0
        for attempt in range(self._tries):
            await asyncio.sleep(pause)
            pause = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
            try:
                answer = await self._post(body)
            except httpx.HTTPError as error:
                cause = self._masked(first_line(error)) or type(error).__name__
                failure = f"cannot be reached ({cause})"
                continue
            if answer.status in _AGAIN:
                failure = f"answers {answer.status} {self._start(answer.text)}"
                pause = max(pause, answer.wanted_pause)
            elif not 200 <= answer.status < 300:
                said = f"{answer.status} {self._start(answer.text)}"
                raise ValueError(f"the judge at {self._place} refuses the request: {said}")
            elif answer.reply is None:
                failure = f"answers something other than a chat completion ({self._start(answer.text)})"
            else:
                return answer.reply
        times = "once" if self._tries == 1 else f"{self._tries} times"
        raise ConnectionError(f"the judge at {self._place}, asked {times}, {failure}")

    async def _post(self, body: dict[str, Any]) -> "_Answer":
        """The server's answer to one request, which is read up to a maximum length."""
        content = b""
        async with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as response:
            async for part in response.aiter_raw():
                content += part
                if len(content) > _MAX_BYTES:
                    raise ValueError(f"the judge at {self._place} answers more than {_MAX_BYTES >> 20} MiB")
            return _Answer(response.status_code, content, response.headers.get("retry-after", ""))

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _start(self, text: str) -> str:
        """The beginning of a server's text, without secrets."""
        line = " ".join(self._masked(text).split())
        return repr(line if len(line) <= 100 else f"{line[:100]}...")

    def _read(self, reply: str) -> float:
        found = self._score.findall(reply)
        if not found:
            raise ValueError(f"the judge's reply has no score ({self._score.pattern}): {self._start(reply)}")
        try:
            score = float(found[-1].replace("\u2212", "-"))
        except ValueError:
            raise ValueError(f"the judge's score is {self._start(found[-1])}, which is no number") from None
        if not self._lowest <= score <= self._highest:
            raise ValueError(f"the judge's score {score:g} is not in {self._lowest:g} to {self._highest:g}")
        return (score - self._lowest) / (self._highest - self._lowest)


def make_judge(options: Mapping[str, Any]) -> Judge:
    """Make the judge with the arguments of a recipe.

    Raises:
        QeRLError: There is no such argument, one is missing, or one is wrong.
    """
    known = list(inspect.signature(Judge).parameters)
    for name in options:
        if name not in known:
            raise QeRLError(f"judge has no option {name!r}; its options are: {', '.join(known)}.")
    for name in ("url", "model"):
        if name not in options:
            raise QeRLError(f"judge lacks {name}; give at least its url and its model.")
    return Judge(**options)


def _problem(prompt: str | list[Message]) -> str:
    """The text of a prompt, without the system's message."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt if message["role"] != "system")


@dataclass(frozen=True)
class _Answer:
    """A server's answer to one request."""

    status: int
    content: bytes
    retry_after: str

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    @property
    def reply(self) -> str | None:
        """The text of the chat completion; None if the content is no chat completion."""
        try:
            text = json.loads(self.content)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return text if isinstance(text, str) else None

    @property
    def wanted_pause(self) -> float:
        """Seconds that the server asks to wait, bounded; 0 if it asks for none."""
        return min(float(self.retry_after), _LONGEST_PAUSE_S) if self.retry_after.isdecimal() else 0.0


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise QeRLError(f"score of the judge is {text!r}, no regular expression: {error}.") from error
    if pattern.groups != 1:
        raise QeRLError(f"score of the judge is {text!r}; it must have one group, which is the score.")
    return pattern


def _ends(scores: Any) -> tuple[float, float]:
    numbers = isinstance(scores, Sequence) and all(
        isinstance(end, int | float) and not isinstance(end, bool) and math.isfinite(end) for end in scores
    )
    if not numbers or len(scores) != 2 or not scores[0] < scores[1]:
        raise QeRLError(f"scores of the judge are {scores!r}; give the lowest and the highest, [0, 10].")
    return float(scores[0]), float(scores[1])


def _number(name: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise QeRLError(f"{name} of the judge is {value!r}; it must be a number, at least {least}.")
    return value


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, or raise if they cannot be sent."""
    try:
        json.dumps(fields, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QeRLError(
            f"request of the judge cannot be sent as JSON ({first_line(error)}); give texts, numbers, "
            "lists and mappings."
        ) from error
    return fields


def _without_user(url: str) -> tuple[str, list[str]]:
    """A URL without user and password, and the forms of the password in which others may repeat it."""
    try:
        parts = urlsplit(url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
    except ValueError as error:
        raise QeRLError(f"url of the judge is no URL ({first_line(error)}); fix it.") from None
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    basic = base64.b64encode(f"{user}:{password}".encode()).decode()  # as the header has it
    return place, [basic, password or user, parts.password or ""] if user or password else []


def _key(variable: str | None) -> str | None:
    """The key in a variable of the environment; None where there is no variable."""
    if variable is None:
        return None
    if not isinstance(variable, str) or not _NAME.fullmatch(variable):
        raise QeRLError("api_key_env of the judge must name an environment variable, not the key itself.")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise QeRLError(f"The environment variable {variable} with the judge's key is not set; export it.")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise QeRLError(
            f"The environment variable {variable} holds no key that HTTP could send: it has a space, a line "
            "break or a character beyond ASCII in it; export the key alone."
        )
    return key
