"""The routes /v1/chat/completions, /v1/completions, /v1/models and, for trajectories, /v1/reward.

A client identifies itself by its key, in the header `Authorization: Bearer KEY` as OpenAI's clients send it.
The `Desk` decides to which client a key belongs, and what the client may request.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from qerl.endpoint.answers import Answers, event_of
from qerl.endpoint.bodies import ApiError, Asked, read_chat, read_completion, read_reward
from qerl.endpoint.reply import Reply
from qerl.errors import QeRLError

logger = logging.getLogger(__name__)

PREFIX = "/v1/"
"""The prefix of all paths."""

LARGEST = 64 << 20
"""Maximum size of a request body in bytes."""

_LOOK_S = 1.0
"""Seconds between two checks whether a client is still connected."""


class Desk(Protocol):
    """Accepts requests and returns their replies; called on the routes' event loop, and must not block it."""

    async def models(self, key: str) -> Sequence[str]:
        """Return the names of the policies that a key may use; raise `ApiError` for an unknown key."""

    async def ask(self, key: str, asked: Asked) -> Reply:
        """Return the reply to a request; raise `ApiError` if the request is refused."""

    def reward(self, key: str, reward: float) -> None:
        """Store the reward of a key's trajectory; raise `ApiError` if there is no such trajectory."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `qerl.endpoint.answers.Decode`."""

    def left(self, reply: Reply) -> None:
        """React to the disconnection of the last client that waited for a reply."""


class Routes:
    """The routes that pass requests to a desk.

    Args:
        desk: Answers the requests.
        rewarded: Whether there is a route for rewards.
    """

    def __init__(self, desk: Desk, rewarded: bool) -> None:
        self._desk, self._rewarded = desk, rewarded

    def routes(self) -> list[BaseRoute]:
        """The routes, for an application."""
        found: list[BaseRoute] = [
            Route("/v1/chat/completions", _safe(self._chat), methods=["POST"]),
            Route("/v1/completions", _safe(self._completion), methods=["POST"]),
            Route("/v1/models", _safe(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", _safe(self._model), methods=["GET"]),
        ]
        if self._rewarded:
            found.append(Route("/v1/reward", _safe(self._reward), methods=["POST"]))
        return found

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat(await _body(request)))

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, read_completion(await _body(request)))

    async def _models(self, request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [_model(each) for each in await self._desk.models(_key(request))]}
        )

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name, await self._desk.models(_key(request)))
        return JSONResponse(_model(name))

    async def _reward(self, request: Request) -> Response:
        self._desk.reward(_key(request), read_reward(await _body(request)))
        return JSONResponse({"object": "reward"})

    async def _answer(self, request: Request, asked: Asked) -> Response:
        key = _key(request)
        reply = await self._desk.ask(key, asked)
        answers = Answers(asked, reply.name, reply.created, self._desk.decode)
        with contextlib.ExitStack() as block:
            told = block.enter_context(self._heard(reply))
            async for _ in self._news(request, reply, told):
                if asked.stream and any(reply.drawn):  # until then it may still be refused
                    break
            if isinstance(reply.outcome, ApiError):
                raise reply.outcome
            if asked.stream:
                pieces = self._pieces(request, reply, answers, told, block.pop_all())
                return StreamingResponse(pieces, media_type="text/event-stream")
            if reply.outcome is None:
                raise ClientDisconnect
            return JSONResponse(answers.whole(reply.outcome))

    async def _pieces(
        self,
        request: Request,
        reply: Reply,
        answers: Answers,
        told: asyncio.Event,
        block: contextlib.ExitStack,
    ) -> AsyncIterator[bytes]:
        """Yield the events of a stream; exit the block after the last one."""
        with block:
            for event in answers.first():
                yield event
            for event in answers.more(reply.drawn):
                yield event
            async for _ in self._news(request, reply, told):
                for event in answers.more(reply.drawn):
                    yield event
            if isinstance(reply.outcome, ApiError):
                yield event_of(reply.outcome.body())
            elif reply.outcome is not None:
                for event in answers.last(reply.outcome):
                    yield event

    @contextlib.contextmanager
    def _heard(self, reply: Reply) -> Iterator[asyncio.Event]:
        """Yield an event that is set on each update of a reply; stop listening at the end of the block."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed when a server ends
                loop.call_soon_threadsafe(told.set)

        reply.listen(wake)
        try:
            yield told
        finally:
            if reply.leave(wake) and reply.outcome is None:
                self._desk.left(reply)

    async def _news(self, request: Request, reply: Reply, told: asyncio.Event) -> AsyncIterator[None]:
        """Yield on each update of a reply, until it has its outcome or its client has disconnected."""
        while reply.outcome is None:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await told.wait()
            except TimeoutError:
                if await request.is_disconnected():
                    return
            else:
                told.clear()
                yield


def check_model(name: str, known: Sequence[str]) -> None:
    """Raise if a model is unknown.

    Raises:
        ApiError: The name is not among ``known``.
    """
    if name not in known:
        raise ApiError(
            f"The model {name[:200]!r} is not served here; use one of: {', '.join(known)}.",
            404,
            param="model",
            code="model_not_found",
        )


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "qerl"}


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise ApiError(
            "The request has no API key; send it as the header Authorization: Bearer KEY, as OpenAI's "
            "clients do with their api_key.",
            401,
            code="invalid_api_key",
        )
    return key.strip()


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise ApiError(f"The body is larger than {LARGEST} bytes; send less.", 413)
    return b"".join(parts)


def _safe(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that its errors have OpenAI's shape."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            found = error
        except ClientDisconnect:
            return Response(status_code=499)  # not sent: the client is gone
        except QeRLError as error:
            found = ApiError(str(error))
        except Exception as error:
            logger.exception("A request failed.")
            found = ApiError(f"The endpoint failed: {type(error).__name__}: {error}", 500)
        return JSONResponse(found.body(), status_code=found.status)

    return handle
