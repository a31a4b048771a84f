"""Results of requests, which clients fetch by request id.

A request that needs the model is answered with an id at once. The client then polls for the result by that
id; each poll is answered within half a minute. A connection may break while an answer is in flight, so a
fetched result is kept for a while. A request that is sent again gets the same id, and so the same result.

Memory is bounded by number and by bytes. If the bytes of a request do not fit, results that have reached
their clients are forgotten; if that is not enough, or the number is reached, the request is refused, and its
client sends it again later. The next request in a model's line is not refused because of the bytes of waiting
requests, which may wait for it; so one request per model may wait beyond the limit. Results may exceed the
bytes until they are fetched: the size of a result is unknown when its request arrives, and a result is never
refused.

Thread-safe: the HTTP thread fetches, the worker thread settles.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

from qerl.errors import QeRLError
from qerl_serve import owners

logger = logging.getLogger(__name__)

ARRIVED_S = 30.0
"""Seconds after the first fetch when a result counts as having reached its client."""

Category = Literal["user", "server"]


@dataclass(frozen=True)
class Answer:
    """A serialized result: JSON, or a protobuf message."""

    body: bytes
    protobuf: bool = False

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Return a result in JSON."""
        return cls(json.dumps(fields).encode())


@dataclass(frozen=True)
class Failure:
    """The error in place of a result: a sentence, and whether the user can fix it."""

    error: str
    category: Category


@dataclass(eq=False)
class Future:
    """A present or future result of a request.

    Attributes:
        request_id: The client's handle.
        kind: Kind of the request, such as `forward_backward`.
        session_id: The session of the request; its end fails and forgets the future.
        told: Called when a client has fetched a failure.
        owner: Name of the request's owner.
        bytes: Size of the request while it waits, then of its result.
        outcome: The result or failure, None while there is none.
        settled, fetched: Times of the result and of its first fetch, in seconds of `time.monotonic`.
    """

    request_id: str
    kind: str
    session_id: str
    told: Callable[[], None] | None = None
    bytes: int = 0
    owner: str = field(default_factory=lambda: owners.now().name)
    outcome: Answer | Failure | None = None
    settled: float | None = None
    fetched: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiters: list[Callable[[], None]] = field(default_factory=list)

    def settle(self, outcome: Answer | Failure) -> None:
        """Set the result; later calls have no effect."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome, self.settled = outcome, time.monotonic()
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def when_settled(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` once the future is settled, in the thread that settles; at once if it is settled
        already."""
        with self._lock:
            if self.outcome is None:
                self._waiters.append(waiter)
                return
        waiter()

    def forget(self, waiter: Callable[[], None]) -> None:
        """Remove `waiter`."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def fetch(self) -> Answer | Failure | None:
        """Return the result for its client and record the fetch; None while there is none."""
        if self.outcome is not None:
            self.fetched = time.monotonic() if self.fetched is None else self.fetched
            if isinstance(self.outcome, Failure) and self.told is not None:
                self.told()
        return self.outcome


class Busy(QeRLError):
    """The server is overloaded; the request may be sent again later."""


class TooLarge(QeRLError):
    """The request exceeds a limit by itself, so it never fits, however often it is sent."""


class Futures:
    """All futures by request id.

    Args:
        max_count: Largest number of futures.
        max_bytes: Largest number of bytes of waiting requests and of results together.
        keep_s: Seconds for which a fetched result is kept.
        unfetched_s: Seconds for which an unfetched result is kept.
    """

    def __init__(self, max_count: int, max_bytes: int, keep_s: float, unfetched_s: float) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._keep_s, self._unfetched_s = keep_s, unfetched_s
        self._futures: dict[str, Future] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def bytes(self) -> int:
        """Bytes of waiting requests and of results."""
        return self._bytes

    def get(self, request_id: str) -> Future | None:
        """The future of a request, None if it is unknown or was fetched long ago."""
        return self._futures.get(request_id)

    def add(self, future: Future, awaited: bool = False) -> Future:
        """Add a future; return it, or the one that has its request id already.

        Args:
            future: The future to add.
            awaited: True if waiting requests may wait for this one, so that their bytes must not keep it out.

        Raises:
            TooLarge: The request alone exceeds its owner's share of the bytes.
            Busy: There are too many futures, or with this one too many bytes.
        """
        share = owners.now().share
        if future.bytes > (most := share * self._max_bytes):
            raise TooLarge(
                f"The request takes {future.bytes} bytes, but this server holds at most {most:.0f} bytes of "
                "your requests (`qerl serve --held_gb`); send less at a time."
            )
        with self._lock:
            if len(self._futures) >= self._max_count:
                raise Busy(
                    f"The server has {len(self._futures)} pending requests and stored results, its limit; "
                    "fetch results, or wait a little, before you send more."
                )
            if share < 1:
                self._check_share(future, share, awaited)
            if self._bytes + future.bytes > self._max_bytes:
                self._make_room(future.bytes, awaited)
            kept = self._futures.setdefault(future.request_id, future)
            if kept is future:
                self._bytes += future.bytes
        if kept is future:
            future.when_settled(partial(self._settled, future))
        return kept

    def sweep(self, now: float) -> None:
        """Forget results that were fetched long ago, and unfetched results after a longer time."""
        with self._lock:
            for request_id, future in list(self._futures.items()):
                since, keep = (
                    (future.settled, self._unfetched_s)
                    if future.fetched is None
                    else (future.fetched, self._keep_s)
                )
                if since is not None and now - since > keep:
                    self._remove(request_id)

    def end(self, session_id: str, failure: Failure) -> None:
        """Fail the waiting requests of a session, and forget all of its results."""
        with self._lock:
            ended = [future for future in self._futures.values() if future.session_id == session_id]
            for future in ended:
                self._remove(future.request_id)
        for future in ended:
            future.settle(failure)

    def fail(self, failure: Failure) -> None:
        """Fail all waiting requests."""
        with self._lock:
            waited_for = [future for future in self._futures.values() if future.settled is None]
        for future in waited_for:
            future.settle(failure)

    def _settled(self, future: Future) -> None:
        """Replace the size of the request by that of its result."""
        size = len(future.outcome.body) if isinstance(future.outcome, Answer) else 0
        with self._lock:
            if self._futures.get(future.request_id) is future:
                self._bytes += size - future.bytes
                future.bytes = size

    def _check_share(self, future: Future, share: float, awaited: bool) -> None:
        """Raise if a request would exceed its owner's share. Results that have reached their clients do not
        count; for an awaited request, waiting requests do not count either.

        Raises:
            Busy: The share is exceeded.
        """
        until = time.monotonic() - ARRIVED_S
        mine = [
            each
            for each in self._futures.values()
            if each.owner == future.owner
            and not (each.fetched and each.fetched < until)
            and (not awaited or each.settled is not None)
        ]
        size = sum(each.bytes for each in mine)
        if len(mine) >= share * self._max_count or size + future.bytes > share * self._max_bytes:
            raise Busy(
                f"{future.owner} has {len(mine)} pending requests and stored results, of {size} bytes; with "
                f"this one they exceed the share of {share:g} of what this server holds. Wait a little."
            )

    def _make_room(self, size: int, awaited: bool) -> None:
        """Forget results that have reached their clients, the first fetched first, until `size` more bytes
        fit.

        Raises:
            Busy: The bytes do not fit; for an awaited request, not even if only results are counted.
        """
        until = time.monotonic() - ARRIVED_S
        fetched = sorted((future.fetched, id_) for id_, future in self._futures.items() if future.fetched)
        old = [id_ for at, id_ in fetched if at < until]
        waiting = sum(future.bytes for future in self._futures.values() if future.settled is None)
        counted = self._bytes - waiting if awaited else self._bytes
        if counted + size - sum(self._futures[id_].bytes for id_ in old) > self._max_bytes:
            raise Busy(
                f"The server holds {self._bytes} bytes of pending requests and stored results; with the "
                f"{size} of this request they exceed its limit of {self._max_bytes} (`qerl serve "
                "--held_gb`). Fetch results, or wait a little, before you send more."
            )
        for request_id in old:
            if self._bytes + size > self._max_bytes:
                self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        self._bytes -= self._futures.pop(request_id).bytes


def failure_of(error: BaseException) -> Failure:
    """Turn an exception into the error that the client receives."""
    category: Category = "user" if isinstance(error, QeRLError) else "server"
    if category == "user":
        return Failure(str(error), category)
    logger.error("A request failed.", exc_info=error)
    return Failure(f"The server failed: {type(error).__name__}: {error}", category)
