"""Requests of one model, in order of their sequence numbers.

Number 0 creates the model. A client numbers the following requests from 1 on and may send them in any order,
because it sends the parts of one call concurrently, the first part last. Requests run by number, each once: a
number that was seen before is a retry, which never runs again.

A failed request may have been part of a call, or the first of several that belong together, such as a
gradient and the optimizer step that applies it. Requests sent before the client learned of the failure are
therefore refused as well, with its cause, so no optimizer step uses half a gradient; requests sent later run.
The worker drops the gradients of earlier parts, so a batch that is sent again counts once.

Not thread-safe; `qerl_serve.queue` holds the lock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qerl.errors import QeRLError
from qerl_serve.futures import Answer, Failure, Future
from qerl_serve.types import Backend

FARTHEST = 100_000
"""A sequence number must be less than this far ahead of the next one to run."""

CHANGES = frozenset({"create_model", "load_weights", "forward_backward", "optim_step"})
"""Kinds of requests whose failure leaves the model in another state than its client assumes."""


@dataclass(frozen=True, eq=False)
class Job:
    """A request of a model: the function that the worker runs, and the future of its result."""

    future: Future
    run: Callable[[Backend], Answer]

    @property
    def kind(self) -> str:
        return self.future.kind


class Line:
    """Pending requests of one model, in order of sequence number."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.next = 0
        self._waiting: dict[int, Job] = {}
        self._arrivals: dict[Any, int] = {}
        self._arrived = 0
        self._failure: Failure | None = None
        self._failed: set[str] = set()
        self._told_at: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def request_id(self, number: int) -> str:
        """Return the request id for a sequence number."""
        return f"{self.model_id}:{number}"

    def place(self, seq_id: int | None) -> int:
        """Return the sequence number of a request; without one, the next after all pending requests.

        Raises:
            QeRLError: The number is negative or too far ahead.
        """
        if seq_id is None:
            return max([self.next, *(number + 1 for number in self._waiting)])
        if not 0 <= seq_id < self.next + FARTHEST:
            raise QeRLError(
                f"seq_id is {seq_id}, but the request of this model that runs next is {self.next}; requests "
                "of a model are numbered from 1 on without gaps."
            )
        return seq_id

    def seen(self, number: int) -> bool:
        """Return True if a request with this number has arrived before."""
        return number < self.next or number in self._waiting

    def add(self, number: int, job: Job) -> None:
        """Enqueue a request."""
        self._arrived += 1
        self._waiting[number] = job
        self._arrivals[job] = self._arrived

    def pop(self) -> Job | None:
        """Remove and return the next request in sequence, and go on to the next number; None if it has not
        arrived."""
        job = self._waiting.pop(self.next, None)
        if job is not None:
            self.next += 1
        return job

    @property
    def ready(self) -> bool:
        """True if the next request in sequence has arrived."""
        return self.next in self._waiting

    @property
    def missing(self) -> int | None:
        """The number that pending requests wait for, None if they wait for none."""
        return self.next if self._waiting and not self.ready else None

    def refusal(self, job: Job) -> Failure | None:
        """Return the failure because of which a popped request must not run, None if it may."""
        arrival = self._arrivals.pop(job)
        if self._told_at is not None and arrival > self._told_at:
            self._failure = self._told_at = None
        if self._failure is not None:
            self._failed.add(job.future.request_id)
        return self._failure

    def failed(self, job: Job, failure: Failure) -> None:
        """Record a failure, because of which requests sent before the client learns of it are refused."""
        if job.kind in CHANGES and self._failure is None:
            self._failed = {job.future.request_id}
            self._failure = Failure(
                f"Not run, because {job.kind} (request {job.future.request_id}), which was sent before it, "
                f"failed: {failure.error}",
                failure.category,
            )

    def told(self, request_id: str) -> None:
        """Record that the client has fetched the failure of a request. It knows the recorded failure if that
        request caused it or was refused because of it."""
        if self._failure is not None and self._told_at is None and request_id in self._failed:
            self._told_at = self._arrived

    def clear(self) -> list[Job]:
        """Remove and return all pending requests."""
        jobs = list(self._waiting.values())
        self._waiting.clear()
        self._arrivals.clear()
        return jobs
