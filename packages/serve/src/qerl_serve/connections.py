"""Limits on client connections: at most as many as file descriptors allow, and none silent for long.

A client of the Tinker API holds one connection per sample that it waits for, so hundreds are the rule. Each
takes one of the process' file descriptors, and without free descriptors no client can connect and no
checkpoint can be written. So some are held back, and a connection without a complete request is closed after
a timeout, or at once if there are too many connections and it is the oldest such one. This holds before its
key is checked.
"""

import asyncio
import contextlib
import logging
import resource
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

_ENOUGH = 1 << 16
"""Maximum number of descriptors to ask for."""

_PATIENCE_S = 10.0
_LEAST_BYTES = 1 << 16
"""In `_PATIENCE_S` seconds a connection must deliver a complete request or at least `_LEAST_BYTES` of one. No
request head is that long."""


def room_for_connections() -> int:
    """Return the maximum number of open connections: half the number of descriptors, which is first raised to
    the hard limit, at most 65,536.

    The other half is for files, the GPU and connections that are accepted but not counted yet, up to three
    times :func:`backlog_of`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own below an infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return (_ENOUGH if soft == resource.RLIM_INFINITY else soft) // 2


def backlog_of(maximum: int) -> int:
    """Return the number of connections that may be accepted at a time, given the maximum of open ones."""
    return max(min(maximum // 4, 2048), 64)


def connection_type(max_connections: int) -> type[H11Protocol]:
    """Return a connection class for uvicorn with a maximum of open connections."""
    return type("ServedConnection", (Connection,), {"max_connections": max_connections, "by_age": {}})


class Connection(H11Protocol):
    """A connection that is closed if it delivers no complete request in time.

    Attributes:
        max_connections: Maximum of open ones. uvicorn's own limit, once reached, would serve none of them.
        by_age: All open connections, oldest first.
    """

    max_connections = 512
    by_age: ClassVar[dict["Connection", None]] = {}
    _told = False
    _look_again: asyncio.TimerHandle | None = None
    _brought = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio once the connection is open."""
        super().connection_made(transport)
        self.by_age[self] = None
        self._wait()
        if len(self.connections) > self.max_connections:
            self._tell()
            owing = (other for other in self.by_age if other._owes() and not other.transport.is_closing())
            next(owing, self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with received data."""
        if self.timeout_keep_alive_task is not None:  # a further request begins
            self._wait()
        self._brought += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio once the connection is closed."""
        if self._look_again is not None:
            self._look_again.cancel()
        self.by_age.pop(self, None)
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Schedule a check of the data that arrive from now on."""
        if self._look_again is not None:
            self._look_again.cancel()
        self._brought = 0
        self._look_again = self.loop.call_later(_PATIENCE_S, self._look)

    def _owes(self) -> bool:
        """Return True if the client has yet to send a first request, or the rest of one; uvicorn bounds the
        idle time between two requests."""
        return self.timeout_keep_alive_task is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _look(self) -> None:
        answered = self.conn.our_state is h11.DONE  # refused before the whole request had arrived
        if self._owes() and (self._brought < _LEAST_BYTES or answered):
            self.transport.abort()
        else:
            self._wait()

    def _tell(self) -> None:
        if not self._told:
            type(self)._told = True
            logger.warning(
                "%d connections are open, half the number of file descriptors of the process; connections "
                "without a request are closed to make room. A larger `ulimit -Hn` allows more.",
                self.max_connections,
            )
