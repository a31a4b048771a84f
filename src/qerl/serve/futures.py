"""Results that clients come back for.

A request that takes the model is answered with an id at once; the client then asks for the result by that
id, again and again, since each question is answered within half a minute. A connection may break while an
answer is on its way, so a result that was fetched stays for a while. A request that is sent again gets the id
that it had, and so the same result.

Thread-safe: HTTP asks in one thread, the worker settles in another.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from qerl.errors import QeRLError

Category = Literal["user", "server"]


@dataclass(frozen=True)
class Answer:
    """A result as it travels: JSON, or a protobuf message."""

    body: bytes
    protobuf: bool = False


@dataclass(frozen=True)
class Failure:
    """Why there is no result: a sentence, and whether the user can mend it."""

    error: str
    category: Category


@dataclass(eq=False)
class Future:
    """A result that is there or will be.

    Attributes:
        request_id: What the client asks by.
        kind: What was asked for, as `forward_backward`.
        session_id: The session that it ends with.
        told: Called when a client has fetched a failure.
        outcome: The result, None while there is none.
        settled, fetched: When it came, and when a client first had it, in seconds of `time.monotonic`.
    """

    request_id: str
    kind: str
    session_id: str
    told: Callable[[], None] | None = None
    outcome: Answer | Failure | None = None
    settled: float | None = None
    fetched: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiters: list[Callable[[], None]] = field(default_factory=list)

    def settle(self, outcome: Answer | Failure) -> None:
        """Give the result; of several the first one counts."""
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
        """Do not call `waiter` any more."""
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
    """The server has too much to do; what was asked for may be asked for again later."""


class Futures:
    """All futures by request id.

    Args:
        most: How many there may be.
        keep_s: A result that was fetched stays for so long.
        unfetched_s: One that was not stays for so long.
    """

    def __init__(self, most: int, keep_s: float, unfetched_s: float) -> None:
        self._most, self._keep_s, self._unfetched_s = most, keep_s, unfetched_s
        self._futures: dict[str, Future] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._futures)

    def get(self, request_id: str) -> Future | None:
        """The future of a request, None if it is unknown or was fetched long ago."""
        return self._futures.get(request_id)

    def add(self, future: Future) -> Future:
        """Keep a new future.

        Raises:
            Busy: There are too many.
        """
        with self._lock:
            if len(self._futures) >= self._most:
                raise Busy(
                    f"The server has {len(self._futures)} requests that wait or were not fetched, its limit; "
                    "fetch results before you send more."
                )
            return self._futures.setdefault(future.request_id, future)

    def sweep(self, now: float) -> None:
        """Forget results that were fetched long ago, and those that nobody fetched for longer."""
        with self._lock:
            for request_id, future in list(self._futures.items()):
                since, keep = (
                    (future.settled, self._unfetched_s)
                    if future.fetched is None
                    else (future.fetched, self._keep_s)
                )
                if since is not None and now - since > keep:
                    del self._futures[request_id]

    def end(self, session_id: str, failure: Failure) -> None:
        """Fail what a session waits for, and forget all of its results."""
        with self._lock:
            ended = [future for future in self._futures.values() if future.session_id == session_id]
            for future in ended:
                del self._futures[future.request_id]
        for future in ended:
            future.settle(failure)
