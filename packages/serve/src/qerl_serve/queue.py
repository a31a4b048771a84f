"""The work for the one worker, and its order.

Three kinds of work: calls, which are short and come first; samples of all clients, which are gathered and run
together; and updates, the requests of each model in their `Line`. The worker alternates between a batch of
samples and a turn of updates, in which each model with a ready request gets on until it has made an optimizer
step. A batch of samples takes in requests that arrive while it runs, unless an update has become ready.

A batch may be long. Once an update has waited for it for some seconds, it is paused for a turn of updates,
and takes in what has arrived until then. The wait is counted from the first round of the batch, or of what
follows a pause, that kept an update waiting, and not from when the update came: so samples are drawn for that
long between two pauses, however long the turns of updates are, and neither starves the other.

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
        gather_s: Pause between requests for samples that ends a burst.
        gather_most_s: Longest burst.
        pause_s: Wait of an update after which a batch of samples is paused for it.
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
        """The future of a function that the worker runs soon."""
        call = Call(run, CallFuture())
        call.result.set_running_or_notify_cancel()
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
        return call.result

    def sample(
        self, future: Future, request: SampleRequest, answer: Callable[[SampleResult], Answer]
    ) -> None:
        """Enqueue a sampling request; `answer`, which the worker calls, as in `SampleJob`."""
        with self._changed:
            self._samples.append(SampleJob(future, request, answer, time.monotonic()))
            self._changed.notify()

    def add_line(self, model_id: str) -> None:
        """Take requests of a model from now on."""
        with self._changed:
            self._lines[model_id] = Line(model_id)

    def submit(self, model_id: str, seq_id: int | None, make: Callable[[str, Line], Job]) -> str:
        """The request id of a model's request, which is enqueued unless it has come before.

        Args:
            model_id: The model, which has a line.
            seq_id: Its number, None for the next one.
            make: Makes the job, of a request id and the line.

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
        """Note that a line's client has fetched the failure of a request."""
        with self._changed:
            line.told(request_id)

    def missing(self, model_id: str) -> int | None:
        """The number of a model's request that others wait for, None if none does."""
        with self._changed:
            line = self._lines.get(model_id)
            return None if line is None else line.missing

    def drop(self, model_id: str) -> list[Job]:
        """Take no more requests of a model; returns its pending ones."""
        with self._changed:
            line = self._lines.pop(model_id, None)
            return [] if line is None else line.clear()

    def drop_samples(self, session_id: str) -> None:
        """Give up the sampling requests of a session."""
        with self._changed:
            self._samples = deque(job for job in self._samples if job.future.session_id != session_id)

    def close(self) -> None:
        """Let the worker end after its present work."""
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
        """The kind of work that comes first, once there is any; None once closed."""
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
        """All pending calls."""
        with self._changed:
            calls, self._calls = list(self._calls), deque()
            return calls

    def take_samples(self) -> list[SampleJob]:
        """The sampling requests of a burst: all pending ones, once requests no longer follow close on one
        another."""
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
        """Sampling requests since samples were taken; none while an update waits that has not just had its
        turn."""
        with self._changed:
            if self._closed or (self._update_ready() and self._last == "samples"):
                return []
            self._last = "samples"
            return self._all_samples()

    def update_overdue(self) -> bool:
        """True if the samples that are being decoded have kept an update waiting for too long; to be asked
        between their rounds."""
        with self._changed:
            now = time.monotonic()
            if not self._update_ready():
                self._kept_since = None
            elif self._kept_since is None:
                self._kept_since = now
            return self._kept_since is not None and now - self._kept_since >= self._pause_s

    def ready_lines(self) -> list[Line]:
        """Lines that have a request ready, for a turn of updates; the first of them comes last the next
        time."""
        with self._changed:
            self._last, self._kept_since = "updates", None
            ready = {model_id: line for model_id, line in self._lines.items() if line.ready}
            for model_id in list(ready)[:1]:
                self._lines[model_id] = self._lines.pop(model_id)
            return list(ready.values())

    def next_update(self, line: Line) -> tuple[Job, Failure | None] | None:
        """The next request in sequence of a line, and the reason why it must not run, if any; None if it
        has not come."""
        with self._changed:
            job = line.pop()
            return None if job is None else (job, line.refusal(job))

    def failed(self, line: Line, job: Job, failure: Failure) -> None:
        """Note that a request of a line failed."""
        with self._changed:
            line.failed(job, failure)

    def _update_ready(self) -> bool:
        return any(line.ready for line in self._lines.values())

    def _all_samples(self) -> list[SampleJob]:
        jobs, self._samples = list(self._samples), deque()
        return jobs
