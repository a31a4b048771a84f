"""What stands before all routes: the key, and the size of a body.

A body is read whole before a route sees it: what a client did not finish sending is not run.
"""

import hmac
import re
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qerl.errors import QeRLError

OPEN = ("/metrics", "/api/v1/healthz", "/api/v1/download/")
"""Paths that need no key; downloads are signed instead."""

_LENGTH = re.compile(rb"[0-9]{1,18}")
"""A body's length in bytes; more digits name none that could be taken."""


class _CutOffError(Exception):
    """A client went in the middle of its body."""


class Gate:
    """Refuses requests without the key, and bodies that are too large, before anything reads them.

    Raises:
        QeRLError: The key is empty, with which everybody would be let in.
    """

    def __init__(self, app: ASGIApp, api_key: str, most: int) -> None:
        if not api_key:
            raise QeRLError("The server's key is empty; give it one that begins with tml-.")
        self._app, self._api_key, self._most = app, api_key.encode(), most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["path"].startswith(OPEN):
            body: bytes | None = b""  # no open path reads one
        elif not hmac.compare_digest(headers.get(b"x-api-key", b""), self._api_key):
            await _refuse(
                401,
                "The API key is not this server's; export TINKER_API_KEY as `qerl serve` printed it.",
                scope, receive, send,
            )  # fmt: skip
            return
        else:
            try:
                body = await self._body(headers, receive)
            except _CutOffError:
                await _refuse(400, "The body was cut off; send it again.", scope, receive, send)
                return
        if body is None:
            too_large = (
                f"The body is larger than {self._most} bytes, which this server takes; send less, with the "
                "same seq_id if it has one, because the later requests of its model wait for that number."
            )
            await _refuse(413, too_large, scope, receive, send)
            return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Any:
            return parts.pop() if parts else await receive()

        await self._app(scope, read, send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body, None if it is too large.

        Raises:
            _CutOffError: The client went before all of it had come.
        """
        length = headers.get(b"content-length")
        if length is not None and not (_LENGTH.fullmatch(length) and int(length) <= self._most):
            return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise _CutOffError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._most:
                return None
        if length is not None and size != int(length):
            raise _CutOffError
        return b"".join(parts)


async def _refuse(status: int, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"detail": why}, status_code=status)(scope, receive, send)
