"""What stands before all routes: the key, and the size of a body."""

import hmac
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qerl.errors import QeRLError

OPEN = ("/metrics", "/api/v1/healthz", "/api/v1/download/")
"""Paths that need no key; downloads are signed instead."""


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
        refused = None
        if not scope["path"].startswith(OPEN) and not hmac.compare_digest(
            headers.get(b"x-api-key", b""), self._api_key
        ):
            refused = (
                401,
                "The API key is not this server's; export TINKER_API_KEY as `qerl serve` printed it.",
            )
        elif (body := await self._body(headers, receive)) is None:
            refused = 413, f"The body is larger than {self._most} bytes, which this server takes; send less."
        if refused is not None:
            await JSONResponse({"detail": refused[1]}, status_code=refused[0])(scope, receive, send)
            return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Any:
            return parts.pop() if parts else await receive()

        await self._app(scope, read, send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body, None if it is too large."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._most:
            return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._most:
                return None
        return b"".join(parts)
