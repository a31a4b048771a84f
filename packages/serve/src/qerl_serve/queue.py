"""What waits for the one worker, and in which order it takes it.

Three kinds of work: calls, which are short and come first; samples of all clients, which are gathered and run
together; and updates, the requests of each model in their `Line`. The worker alternates between a batch of
samples and a turn of updates, in which each model that has something ready gets on until it has made an
optimizer step. A batch of samples takes in what arrives while it runs, unless an update has become ready.

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
from qerl_serve.futures import Failure, Future
from qerl_serve.line import Job, Line
from qerl_serve.types import Backend, SampleRequest

Turn = Literal["calls", "samples", "updates"]


@dataclass(frozen=True, eq=False)
class Call:
    """Short work on the backend; what it returns or raises goes to `result`."""

    run: Callable[[Backend], Any]
    result: "CallFuture[Any]"


@dataclass(frozen=True, eq=False)
class SampleJob:
    """A request for samples, when it came, and of how many tokens at the end of the prompt log-probabilities
    are wanted (None for all)."""

    future: Future
    request: SampleRequest
    last_n: int | None
    arrived: float


class WorkQueue:
    """Work that waits.

    Args:
        gather_s: The others of a burst of requests for samples are waited for until none comes for so long.
        gather_most_s: But no longer than this after the first.
    """

    def __init__(self, gather_s: float, gather_most_s: float) -> None:
        self._gather_s, self._gather_most_s = gather_s, gather_most_s
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._samples: deque[SampleJob] = deque()
        self._lines: dict[str, Line] = {}
        self._last: Turn = "updates"
        self._closed = False

    def call(self, run: Callable[[Backend], Any]) -> "CallFuture[Any]":
        """Let the worker run a function soon; the future has what it returns or raises."""
        call = Call(run, CallFuture())
        call.result.set_running_or_notify_cancel()
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
        return call.result

    def sample(self, future: Future, request: SampleRequest, last_n: int | None = None) -> None:
        """Let a request for samples wait; `last_n` as in `SampleJob`."""
        with self._changed:
            self._samples.append(SampleJob(future, request, last_n, time.monotonic()))
            self._changed.notify()

    def add_line(self, model_id: str) -> None:
        """Take requests of a model from now on."""
        with self._changed:
            self._lines[model_id] = Line(model_id)

    def submit(self, model_id: str, seq_id: int | None, make: Callable[[str, Line], Job]) -> str:
        """Let a request of a model wait for its turn, unless it has come before.

        Args:
            model_id: The model, which has a line.
            seq_id: Its number, None for the next one.
            make: Makes the job, of a request id and the line.

        Returns:
            The request id.

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
        """The number of a model's request for which others wait, None if none does."""
        with self._changed:
            line = self._lines.get(model_id)
            return None if line is None else line.missing

    def drop(self, model_id: str) -> list[Job]:
        """Take no more requests of a model; returns those that waited."""
        with self._changed:
            line = self._lines.pop(model_id, None)
            return [] if line is None else line.clear()

    def drop_samples(self, session_id: str) -> None:
        """Give up the requests for samples of a session."""
        with self._changed:
            self._samples = deque(job for job in self._samples if job.future.session_id != session_id)

    def close(self) -> None:
        """Let the worker end after what it runs."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def depths(self) -> dict[str, int]:
        """How much waits, by kind of work."""
        with self._changed:
            return {
                "samples": len(self._samples),
                "updates": sum(map(len, self._lines.values())),
                "calls": len(self._calls),
            }

    # For the worker.

    def turn(self) -> Turn | None:
        """Wait for work; says which comes first, None once closed."""
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
        """All calls that wait."""
        with self._changed:
            calls, self._calls = list(self._calls), deque()
            return calls

    def take_samples(self) -> list[SampleJob]:
        """The requests of a burst: all that wait, after those that follow close on one another."""
        with self._changed:
            while self._samples and not self._closed:
                first, last = self._samples[0].arrived, self._samples[-1].arrived
                left = min(last + self._gather_s, first + self._gather_most_s) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._all_samples()

    def late_samples(self) -> list[SampleJob]:
        """What came in since samples were taken; nothing while an update waits."""
        with self._changed:
            return [] if self._update_ready() or self._closed else self._all_samples()

    def ready_lines(self) -> list[Line]:
        """Lines that have a request ready; the first of them comes last the next time."""
        with self._changed:
            ready = {model_id: line for model_id, line in self._lines.items() if line.ready}
            for model_id in list(ready)[:1]:
                self._lines[model_id] = self._lines.pop(model_id)
            return list(ready.values())

    def next_update(self, line: Line) -> tuple[Job, Failure | None] | None:
        """The request of a line whose turn it is, and why it must not run if it must not; None if it has not
        come."""
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
