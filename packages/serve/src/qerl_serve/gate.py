"""The checks before all routes: the API key, which identifies the owner of a request, and the size of the
body.

A body is read completely before a route sees it, so a truncated request never runs. While a body arrives, it
counts against the limit for all incoming bodies; above that limit it is refused, to be sent again. (Waiting
requests are counted elsewhere, since an incoming body may be the one that they wait for.) A JSON body may be
no longer than one with a prompt of the whole context, because it is parsed in the thread that answers all
clients.
"""

import re
from collections import Counter
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qerl.endpoint.bodies import ApiError
from qerl.endpoint.http import PREFIX
from qerl_serve import owners
from qerl_serve.owners import Keys, Owner

OPEN = ("/metrics", "/api/v1/healthz", "/api/v1/download/")
"""Paths that need no key; downloads are signed instead."""

_LENGTH = re.compile(rb"[0-9]{1,18}")
"""A body's length in bytes; a number with more digits exceeds every limit."""


TENSORS = "/api/v1/forward_backward"
"""The path whose bodies are protobuf instead of JSON."""


class _CutOffError(Exception):
    """The body ended before it was complete."""


class _TooManyError(Exception):
    """With this body the incoming ones would take too much memory."""


class Gate:
    """Refuses requests without a valid key, and bodies that are too large, before any route reads them.

    Args:
        app: The application behind it.
        keys: The valid keys.
        max_tensors: Maximum bytes of a body with tensors.
        max_json: Maximum bytes of any other body.
        max_coming: Maximum bytes of all incoming bodies together. An owner's share bounds the owner's bodies
            likewise, but a single body always fits the share.
    """

    def __init__(self, app: ASGIApp, keys: Keys, max_tensors: int, max_json: int, max_coming: int) -> None:
        self._app, self._keys = app, keys
        self._max_tensors, self._max_json, self._max_coming = max_tensors, max_json, max_coming
        self._coming: Counter[str] = Counter()  # bytes by owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        maximum = self._max_tensors if scope["path"] == TENSORS else self._max_json
        if scope["path"].startswith(OPEN):
            body: bytes | None = b""  # no open path reads one
        elif (owner := self._keys.owner(_key_of(scope["path"], headers))) is None:
            name = "OPENAI_API_KEY" if scope["path"].startswith(PREFIX) else "TINKER_API_KEY"
            await _refuse(
                401,
                f"The API key is not this server's; export {name} as `qerl serve` printed it, or your own "
                "key from its file --keys.",
                scope, receive, send,
            )  # fmt: skip
            return
        else:
            owners.enter(owner)
            try:
                body = await self._body(headers, receive, maximum, owner)
            except _CutOffError:
                await _refuse(400, "The body was cut off; send it again.", scope, receive, send)
                return
            except _TooManyError:
                yours = self._coming[owner.name]
                full = (
                    f"Bodies being received take {self._coming.total()} bytes, {yours} of them yours; with "
                    f"this one they exceed the limit of {self._max_coming} (`qerl serve --held_gb`) or your "
                    "share of it. Send it again in a moment."
                )
                await _refuse(429, full, scope, receive, send)
                return
        if body is None:
            too_large = (
                f"The body is larger than {maximum} bytes, the limit of this server; send less, with the "
                "same seq_id if it has one, because later requests of its model wait for that number."
            )
            await _refuse(413, too_large, scope, receive, send)
            return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Any:
            return parts.pop() if parts else await receive()

        await self._app(scope, read, send)

    async def _body(
        self, headers: dict[bytes, bytes], receive: Receive, maximum: int, owner: Owner
    ) -> bytes | None:
        """Return the whole body, None if it is larger than `maximum` bytes.

        Raises:
            _CutOffError: The client disconnected before the body was complete.
            _TooManyError: With this body the incoming ones would take too much memory.
        """
        length = headers.get(b"content-length")
        if length is not None and not (_LENGTH.fullmatch(length) and int(length) <= maximum):
            return None
        declared = int(length or 0)
        most = max(owner.share * self._max_coming, maximum)
        parts, size, counted, more = [], 0, 0, True
        try:
            while more:
                if (new := max(declared, size) - counted) > 0:
                    if self._coming.total() + new > self._max_coming or self._coming[owner.name] + new > most:
                        raise _TooManyError
                    self._coming[owner.name] += new
                    counted += new
                message = await receive()
                if message["type"] != "http.request":
                    raise _CutOffError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message.get("more_body", False)
                if size > maximum:
                    return None
        finally:
            self._coming[owner.name] -= counted
        if length is not None and size != declared:
            raise _CutOffError
        return b"".join(parts)


def _key_of(path: str, headers: dict[bytes, bytes]) -> bytes:
    """Return the key of a request: the bearer token on OpenAI's routes, else the header X-API-Key."""
    if path.startswith(PREFIX):
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return headers.get(b"x-api-key", b"")


async def _refuse(status: int, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    body = ApiError(why, status).body() if scope["path"].startswith(PREFIX) else {"detail": why}
    await JSONResponse(body, status_code=status)(scope, receive, send)
