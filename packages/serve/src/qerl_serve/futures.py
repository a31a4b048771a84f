"""Results that clients fetch.

A request that takes the model is answered with an id at once; the client then asks for the result by that id,
again and again, since each question is answered within half a minute. A connection may break while an answer
is on its way, so a fetched result stays for a while. A request that is sent again gets the id that it had,
and so the same result.

Memory is bounded, by number and by bytes. Where a request does not fit, results that have arrived at their
clients make room; where that is not enough it is refused, and its client sends it again later. A request
whose turn it is in its model's line is not refused because of waiting requests, which may wait for it. So of
each model one more request than fits may wait. Results may exceed the bytes until they are fetched: the size
of a result is unknown when its request comes, and a result is never refused.

Thread-safe: HTTP asks in one thread, the worker settles in another.
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
"""A result that was fetched so long ago has arrived at its client."""

Category = Literal["user", "server"]


@dataclass(frozen=True)
class Answer:
    """A result as it travels: JSON, or a protobuf message."""

    body: bytes
    protobuf: bool = False

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """A result in JSON."""
        return cls(json.dumps(fields).encode())


@dataclass(frozen=True)
class Failure:
    """The error in place of a result: a sentence, and whether the user can fix it."""

    error: str
    category: Category


@dataclass(eq=False)
class Future:
    """A result that is there or will be.

    Attributes:
        request_id: The client's handle.
        kind: Of the request, as `forward_backward`.
        session_id: The session that it ends with.
        told: Called when a client has fetched a failure.
        owner: Whose request it is.
        bytes: Of the request while it waits, of the result once it is there.
        outcome: The result, None while there is none.
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
        """Set the result; of several the first one counts."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome, self.settled = outcome, time.monotonic()
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def when_settled(self, waiter: Callable[[], None]) -> None:
        """Call `waiter` once, from whichever thread settles; at once if it is settled."""
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
        """The result for a client that asks, None while there is none."""
        if self.outcome is not None:
            self.fetched = time.monotonic() if self.fetched is None else self.fetched
            if isinstance(self.outcome, Failure) and self.told is not None:
                self.told()
        return self.outcome


class Busy(QeRLError):
    """The server has too much to do; the request may be sent again later."""


class TooLarge(QeRLError):
    """The request never fits, however often it is sent."""


class Futures:
    """All futures by request id.

    Args:
        max_count: Largest number of futures.
        max_bytes: Largest number of bytes of waiting requests and of results together.
        keep_s: Seconds that a fetched result stays.
        unfetched_s: Seconds that another one stays.
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
        """Bytes of requests that wait and of results."""
        return self._bytes

    def get(self, request_id: str) -> Future | None:
        """The future of a request, None if it is unknown or was fetched long ago."""
        return self._futures.get(request_id)

    def add(self, future: Future, awaited: bool = False) -> Future:
        """Keep a new future.

        Args:
            future: Kept, unless there is one of its request id.
            awaited: True if waiting requests may wait for this one, so that their bytes must not keep it out.

        Raises:
            TooLarge: It alone exceeds the bytes of all.
            Busy: There are too many, or with it they are too large.
        """
        share = owners.now().share
        if future.bytes > (most := share * self._max_bytes):
            raise TooLarge(
                f"The request takes {future.bytes} bytes, and this server holds {most:.0f} of your requests "
                "together (`qerl serve --held_gb`); send less at a time."
            )
        with self._lock:
            if len(self._futures) >= self._max_count:
                raise Busy(
                    f"The server has {len(self._futures)} requests that wait or were not fetched, its limit; "
                    "fetch results before you send more."
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
        """Forget results that were fetched long ago, and unfetched ones after a longer time."""
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
        """Count the result in the place of the request."""
        size = len(future.outcome.body) if isinstance(future.outcome, Answer) else 0
        with self._lock:
            if self._futures.get(future.request_id) is future:
                self._bytes += size - future.bytes
                future.bytes = size

    def _check_share(self, future: Future, share: float, awaited: bool) -> None:
        """Refuse a request with which its owner has too much; results that have arrived do not count, and
        beside one that others wait for no requests do.

        Raises:
            Busy: They have.
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
                f"{future.owner} has {len(mine)} requests that wait and results, of {size} bytes, and with "
                f"this one more than a share of {share:g} of what this server holds; wait a little."
            )

    def _make_room(self, size: int, awaited: bool) -> None:
        """Forget results that have arrived, the first fetched first, until this number of bytes fits.

        Raises:
            Busy: They do not fit; if the request is awaited, not even beside the results alone.
        """
        until = time.monotonic() - ARRIVED_S
        fetched = sorted((future.fetched, id_) for id_, future in self._futures.items() if future.fetched)
        old = [id_ for at, id_ in fetched if at < until]
        waiting = sum(future.bytes for future in self._futures.values() if future.settled is None)
        counted = self._bytes - waiting if awaited else self._bytes
        if counted + size - sum(self._futures[id_].bytes for id_ in old) > self._max_bytes:
            raise Busy(
                f"The server holds {self._bytes} bytes of requests that wait and of results; with the {size} "
                f"of this request they exceed its limit of {self._max_bytes} (`qerl serve --held_gb`). "
                "Fetch results, or wait a little, before you send more."
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
