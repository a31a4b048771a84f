"""The work queue of the worker thread, and the order of its work.

There are three kinds of work: calls, which are short and come first; samples of all clients, which are
gathered and run together; and updates, the requests of each model in their `Line`. The worker alternates
between a batch of samples and a turn of updates, in which each model with a ready request goes on until it
has made an optimizer step. A batch of samples takes in requests that arrive while it runs, unless an update
has become ready.

A batch may be long. Once it has kept an update waiting for some seconds, it is paused for a turn of updates,
and then takes in the requests that have arrived. The wait is counted from the batch's first round, or the
first after a pause, that kept an update waiting, and not from the arrival of the update: so sampling runs at
least that long between two pauses, however long the turns of updates are, and neither starves the other.

Thread-safe.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as CallFuture
from dataclasses import dataclass
from typing import Any, Literal

from qerl.errors import QeRLError
from qerl_serve.futures import Answer, Failure, Future
from qerl_serve.line import Job, Line
from qerl_serve.types import Backend, SampleRequest, SampleResult

Turn = Literal["calls", "samples", "updates"]


@dataclass(frozen=True, eq=False)
class Call:
    """Short work on the backend; `result` gets its return value or exception."""

    run: Callable[[Backend], Any]
    result: "CallFuture[Any]"


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A sampling request, how its result is answered, and its time of arrival."""

    future: Future
    request: SampleRequest
    answer: Callable[[SampleResult], Answer]
    arrived: float


class WorkQueue:
    """Pending work.

    Args:
        gather_s: Seconds without a new sampling request that end a burst.
        gather_most_s: Maximum length of a burst in seconds.
        pause_s: Seconds that a batch of samples may keep an update waiting before it is paused.
    """

    def __init__(self, gather_s: float, gather_most_s: float, pause_s: float) -> None:
        self._gather_s, self._gather_most_s, self._pause_s = gather_s, gather_most_s, pause_s
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._samples: deque[SampleJob] = deque()
        self._lines: dict[str, Line] = {}
        self._last: Turn = "updates"
        self._kept_since: float | None = None  # when samples began to keep an update waiting
        self._closed = False

    def call(self, run: Callable[[Backend], Any]) -> "CallFuture[Any]":
        """Enqueue a function for the worker; return the future of its result."""
        call = Call(run, CallFuture())
        call.result.set_running_or_notify_cancel()
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
        return call.result

    def sample(
        self, future: Future, request: SampleRequest, answer: Callable[[SampleResult], Answer]
    ) -> None:
        """Enqueue a sampling request; the worker calls `answer` with its result."""
        with self._changed:
            self._samples.append(SampleJob(future, request, answer, time.monotonic()))
            self._changed.notify()

    def add_line(self, model_id: str) -> None:
        """Accept requests of a model from now on."""
        with self._changed:
            self._lines[model_id] = Line(model_id)

    def submit(self, model_id: str, seq_id: int | None, make: Callable[[str, Line], Job]) -> str:
        """Enqueue a model's request unless it has arrived before; return its request id.

        Args:
            model_id: The model.
            seq_id: The sequence number, None for the next one.
            make: Makes the job, given the request id and the line.

        Raises:
            QeRLError: The model has ended, the number is out of range, or `make` refuses.
        """
        with self._changed:
            line = self._lines.get(model_id)
            if line is None:
                raise QeRLError(f"The model {model_id} has just ended; make a new one.")
            number = line.place(seq_id)
            request_id = line.request_id(number)
            if not line.seen(number):
                line.add(number, make(request_id, line))
                self._changed.notify()
            return request_id

    def told(self, line: Line, request_id: str) -> None:
        """Record that the client of a line has fetched the failure of a request."""
        with self._changed:
            line.told(request_id)

    def missing(self, model_id: str) -> int | None:
        """Return the sequence number that a model's pending requests wait for, None if they wait for none."""
        with self._changed:
            line = self._lines.get(model_id)
            return None if line is None else line.missing

    def drop(self, model_id: str) -> list[Job]:
        """Accept no more requests of a model; return its pending ones."""
        with self._changed:
            line = self._lines.pop(model_id, None)
            return [] if line is None else line.clear()

    def drop_samples(self, session_id: str) -> None:
        """Remove the pending sampling requests of a session."""
        with self._changed:
            self._samples = deque(job for job in self._samples if job.future.session_id != session_id)

    def close(self) -> None:
        """Make the worker end after its present work."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def depths(self) -> dict[str, int]:
        """Number of pending items, by kind of work."""
        with self._changed:
            return {
                "samples": len(self._samples),
                "updates": sum(map(len, self._lines.values())),
                "calls": len(self._calls),
            }

    # For the worker.

    def turn(self) -> Turn | None:
        """Wait for work and return the kind that comes first; None once the queue is closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                ready: list[Turn] = ["updates"] if self._update_ready() else []
                if self._samples:
                    ready.append("samples")
                if self._calls:
                    return "calls"
                if ready:
                    self._last = next((kind for kind in ready if kind != self._last), ready[0])
                    return self._last
                self._changed.wait()

    def take_calls(self) -> list[Call]:
        """Remove and return all pending calls."""
        with self._changed:
            calls, self._calls = list(self._calls), deque()
            return calls

    def take_samples(self) -> list[SampleJob]:
        """Wait for the end of a burst; remove and return all pending sampling requests."""
        with self._changed:
            self._kept_since = None
            while self._samples and not self._closed:
                first, last = self._samples[0].arrived, self._samples[-1].arrived
                left = min(last + self._gather_s, first + self._gather_most_s) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._all_samples()

    def late_samples(self) -> list[SampleJob]:
        """Remove and return the sampling requests that arrived during a batch; none while an update is ready,
        except once after each turn of updates."""
        with self._changed:
            if self._closed or (self._update_ready() and self._last == "samples"):
                return []
            self._last = "samples"
            return self._all_samples()

    def update_overdue(self) -> bool:
        """Return True if the running batch of samples has kept an update waiting for too long; called between
        its rounds."""
        with self._changed:
            now = time.monotonic()
            if not self._update_ready():
                self._kept_since = None
            elif self._kept_since is None:
                self._kept_since = now
            return self._kept_since is not None and now - self._kept_since >= self._pause_s

    def ready_lines(self) -> list[Line]:
        """Begin a turn of updates: return the lines with a ready request. The first one comes last in the
        next turn."""
        with self._changed:
            self._last, self._kept_since = "updates", None
            ready = {model_id: line for model_id, line in self._lines.items() if line.ready}
            for model_id in list(ready)[:1]:
                self._lines[model_id] = self._lines.pop(model_id)
            return list(ready.values())

    def next_update(self, line: Line) -> tuple[Job, Failure | None] | None:
        """Remove and return a line's next request in sequence, with the failure because of which it must not
        run, if any; None if the request has not arrived."""
        with self._changed:
            job = line.pop()
            return None if job is None else (job, line.refusal(job))

    def failed(self, line: Line, job: Job, failure: Failure) -> None:
        """Record the failure of a line's request."""
        with self._changed:
            line.failed(job, failure)

    def _update_ready(self) -> bool:
        return any(line.ready for line in self._lines.values())

    def _all_samples(self) -> list[SampleJob]:
        jobs, self._samples = list(self._samples), deque()
        return jobs
