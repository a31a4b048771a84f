"""One model's requests, in the order of their sequence numbers.

Number 0 makes the model. A client numbers the requests that follow from 1 on and may send them in any order,
because it sends parts of one call side by side, the first one last. They run by number, each once. A number
that was seen before is a request sent again, which never runs again.

A request that fails may have been part of a call, or the first of several that belong together: a gradient
and the step that takes it. Requests sent before the client learned of the failure are refused as well, with
the cause, so no step is made with half a gradient; later ones were sent knowing of it, and run. The worker
drops the gradients of earlier parts, so that a batch that is sent again counts once.

No threads in here; `qerl_serve.queue` locks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qerl.errors import QeRLError
from qerl_serve.futures import Answer, Failure, Future
from qerl_serve.types import Backend

FARTHEST = 100_000
"""A request may be so many numbers ahead of the one that is next."""

CHANGES = frozenset({"create_model", "load_weights", "forward_backward", "optim_step"})
"""Kinds after whose failure the model is not what the client takes it for."""


@dataclass(frozen=True, eq=False)
class Job:
    """A request as the worker runs it."""

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
        """The id of the request of a number."""
        return f"{self.model_id}:{number}"

    def place(self, seq_id: int | None) -> int:
        """The number of a request; one without gets the next free one.

        Raises:
            QeRLError: The number is negative or far ahead.
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
        """True if a request of this number has come before."""
        return number < self.next or number in self._waiting

    def add(self, number: int, job: Job) -> None:
        """Enqueue a request."""
        self._arrived += 1
        self._waiting[number] = job
        self._arrivals[job] = self._arrived

    def pop(self) -> Job | None:
        """The next request in sequence, None if it has not come; the turn passes to the next number."""
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
        """The number that others wait for, None if none does."""
        return self.next if self._waiting and not self.ready else None

    def refusal(self, job: Job) -> Failure | None:
        """The reason why the next request in sequence must not run, None if it may."""
        arrival = self._arrivals.pop(job)
        if self._told_at is not None and arrival > self._told_at:
            self._failure = self._told_at = None
        if self._failure is not None:
            self._failed.add(job.future.request_id)
        return self._failure

    def failed(self, job: Job, failure: Failure) -> None:
        """Note that a request failed."""
        if job.kind in CHANGES and self._failure is None:
            self._failed = {job.future.request_id}
            self._failure = Failure(
                f"Not run, because {job.kind} (request {job.future.request_id}), which was sent before it, "
                f"failed: {failure.error}",
                failure.category,
            )

    def told(self, request_id: str) -> None:
        """Note that the client has fetched the failure of a request: it knows of the one that counts if
        this is it, or was refused because of it."""
        if self._failure is not None and self._told_at is None and request_id in self._failed:
            self._told_at = self._arrived

    def clear(self) -> list[Job]:
        """Give up all pending requests; returns them."""
        jobs = list(self._waiting.values())
        self._waiting.clear()
        self._arrivals.clear()
        return jobs
