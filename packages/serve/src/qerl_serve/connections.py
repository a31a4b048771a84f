"""Connections of clients: no more than there are descriptors for, and no silent ones for long.

A client of the Tinker API holds a connection for every sample that it waits for, so hundreds are the rule.
Each takes one of the process' descriptors, and without descriptors neither a client can connect nor a
checkpoint be written. So some are kept back, and a connection that brings no whole request is closed after a
while, or as soon as there are too many and it is the oldest of those. That holds before its key is checked.
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
"""More descriptors are not asked for."""

_PATIENCE_S = 10.0
_LEAST_BYTES = 1 << 16
"""A connection brings a whole request, or so many bytes of one, in so many seconds. No head is as long."""


def room_for_connections() -> int:
    """The number of connections that may be open at once: half as many as descriptors, which are raised to
    the hard limit, at most 65,536.

    The rest is for files, the GPU and connections that are accepted and not counted yet, up to three times
    :func:`backlog_of`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own below an infinite one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return (_ENOUGH if soft == resource.RLIM_INFINITY else soft) // 2


def backlog_of(maximum: int) -> int:
    """Number of connections that may be accepted at a time, of a maximum of open ones."""
    return max(min(maximum // 4, 2048), 64)


def connection_type(max_connections: int) -> type[H11Protocol]:
    """uvicorn's class of connections, with a maximum of open ones."""
    return type("ServedConnection", (Connection,), {"max_connections": max_connections, "by_age": {}})


class Connection(H11Protocol):
    """One connection, closed if it brings nothing.

    Attributes:
        max_connections: Maximum of open ones; uvicorn's own limit would answer none of them once it is
            reached.
        by_age: All open ones, the oldest first.
    """

    max_connections = 512
    by_age: ClassVar[dict["Connection", None]] = {}
    _told = False
    _look_again: asyncio.TimerHandle | None = None
    _brought = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio once it is open."""
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
        """Called by asyncio once it is closed."""
        if self._look_again is not None:
            self._look_again.cancel()
        self.by_age.pop(self, None)
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Check in a while if data have come."""
        if self._look_again is not None:
            self._look_again.cancel()
        self._brought = 0
        self._look_again = self.loop.call_later(_PATIENCE_S, self._look)

    def _owes(self) -> bool:
        """True if it has begun a request without its end; uvicorn bounds how long it may be idle between
        two requests."""
        return self.timeout_keep_alive_task is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _look(self) -> None:
        answered = self.conn.our_state is h11.DONE  # refused before all of it had come
        if self._owes() and (self._brought < _LEAST_BYTES or answered):
            self.transport.abort()
        else:
            self._wait()

    def _tell(self) -> None:
        if not self._told:
            type(self)._told = True
            logger.warning(
                "There are %d connections, half as many as the process has descriptors; those that bring no "
                "request are closed for others. A larger `ulimit -Hn` allows more.",
                self.max_connections,
            )
