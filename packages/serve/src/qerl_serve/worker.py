"""The single thread that runs the model.

Sampling and updates share the weights, the memory and the processor, so they take turns, and every call of
the backend happens in this thread. A turn of updates may lie within a batch of samples, which is paused for
it. A failure ends only the request that caused it: a client's mistake is answered with an error message, a
defect is named to the client and logged with its traceback.

One failure ends the worker, and with it the server: a GPU fault, after which nothing more can be computed in
this process. Otherwise the server would look alive while every request failed.
"""

import logging
import threading
import time
from collections.abc import Callable

import torch

from qerl.errors import QeRLError, first_line
from qerl_serve.futures import Answer, Failure, failure_of
from qerl_serve.line import CHANGES, Job, Line
from qerl_serve.metrics import Metrics
from qerl_serve.queue import SampleJob, WorkQueue
from qerl_serve.types import Backend, SampleRequest, SampleResult

logger = logging.getLogger(__name__)

JOBS_PER_TURN = 64
"""Maximum requests that a model without an optimizer step runs in a turn of updates."""

DROPPED = (
    "The gradients since the model's last optimizer step were dropped with it; send that whole batch again."
)


class Worker(threading.Thread):
    """Runs the work of the queue until it is closed or something breaks, then closes the backend.

    Attributes:
        gauges: The backend's gauges after the last turn.
        broken: The reason why no further request can run; None while nothing is broken.
        on_break: Called with that reason, in this thread, as soon as it is known.
    """

    def __init__(self, queue: WorkQueue, backend: Backend, metrics: Metrics) -> None:
        super().__init__(name="qerl-serve-worker", daemon=True)
        self._queue, self._backend, self._metrics = queue, backend, metrics
        self.gauges: dict[str, float] = {}
        self.broken: str | None = None
        self.on_break: Callable[[str], None] = lambda _: None

    def run(self) -> None:
        """Take turns until the queue is closed."""
        try:
            self._turns()
        except BaseException as error:  # a defect of the worker itself
            self._break(error)
        try:
            self._backend.close()
        except Exception:
            logger.exception("The backend could not be closed.")

    def _turns(self) -> None:
        turns = {"calls": self._calls, "samples": self._samples, "updates": self._updates}
        while self.broken is None and (turn := self._queue.turn()) is not None:
            turns[turn]()
            self.gauges = dict(self._backend.gauges())

    def _break(self, error: BaseException) -> None:
        if self.broken is None:
            logger.critical("The server ends.", exc_info=error)
            self.broken = (
                f"The server ends, because nothing more can be run in its process ({type(error).__name__}: "
                f"{first_line(error)}); start it again. What was saved is still there."
            )
            self.on_break(self.broken)

    def _failure_of(self, error: Exception) -> Failure:
        """Turn an exception into the error that the client receives; end the worker if the GPU is lost."""
        if not isinstance(error, QeRLError) and _gpu_is_lost():
            self._break(error)
        return failure_of(error)

    def _calls(self) -> None:
        for call in self._queue.take_calls():
            try:
                call.result.set_result(call.run(self._backend))
            except BaseException as error:  # goes to the thread that waits for it
                if isinstance(error, Exception):
                    self._failure_of(error)
                call.result.set_exception(error)

    def _updates(self) -> None:
        for line in self._queue.ready_lines():
            for _ in range(JOBS_PER_TURN):
                self._calls()
                if self.broken is not None:
                    return
                if (taken := self._queue.next_update(line)) is None:
                    break
                self._update(line, *taken)
                if taken[0].kind == "optim_step":
                    break

    def _update(self, line: Line, job: Job, refusal: Failure | None) -> None:
        if job.future.outcome is not None:  # its session or the server has ended
            return
        if refusal is not None:
            job.future.settle(refusal)
            return
        began = time.monotonic()
        try:
            outcome: Answer | Failure = job.run(self._backend)
        except Exception as error:
            outcome = self._without_gradients(line, job, self._failure_of(error))
            self._queue.failed(line, job, outcome)
        self._metrics.ran(job.kind, time.monotonic() - began, outcome)
        job.future.settle(outcome)

    def _without_gradients(self, line: Line, job: Job, failure: Failure) -> Failure:
        """Drop a model's gradients after a failed request of a kind in `CHANGES`; return the failure, which
        names the dropped gradients if there were any."""
        if job.kind not in CHANGES or not self._backend.drop_gradients(line.model_id):
            return failure
        return Failure(f"{failure.error} {DROPPED}", failure.category)

    def _samples(self) -> None:
        jobs = self._queue.take_samples()
        open_jobs = dict(enumerate(jobs))
        count, paused = len(jobs), 0.0

        def arrived() -> list[SampleRequest]:
            nonlocal count
            self._calls()
            late = self._queue.late_samples()
            open_jobs.update(enumerate(late, start=count))
            count += len(late)
            return [job.request for job in late]

        def pause() -> None:
            nonlocal paused
            begin = time.monotonic()
            try:
                self._updates()
                self.gauges = dict(self._backend.gauges())
            except Exception as error:  # a defect of the worker, which the batch would take for its own
                self._break(error)
                raise
            self._metrics.paused()
            paused += time.monotonic() - begin

        def overdue() -> Callable[[], None] | None:
            return pause if self._queue.update_overdue() else None

        began = time.monotonic()
        try:
            for index, result in self._backend.sample([job.request for job in jobs], arrived, overdue):
                self._settle(open_jobs.pop(index), result)
        except Exception as error:
            outcome = self._failure_of(error)
        else:
            outcome = Failure("The server failed: its sampler gave no answer to this request.", "server")
        for job in open_jobs.values():
            self._metrics.ran("sample", time.monotonic() - job.arrived, outcome)
            job.future.settle(outcome)
        self._metrics.batch(count, time.monotonic() - began - paused)

    def _settle(self, job: SampleJob, result: SampleResult | Exception) -> None:
        outcome: Answer | Failure
        if isinstance(result, Exception):
            outcome = self._failure_of(result)
        else:
            self._metrics.sampled(len(job.request.prompt), result)
            try:
                outcome = job.answer(result)
            except Exception as error:
                outcome = self._failure_of(error)
        self._metrics.ran("sample", time.monotonic() - job.arrived, outcome)
        job.future.settle(outcome)


def _gpu_is_lost() -> bool:
    """Return True if nothing more can be computed on the GPU in this process.

    The GPU itself is probed: a fault surfaces as an error of torch, Triton or the driver, and torch raises
    the same class for errors that the GPU survives.
    """
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # of whichever class
        return True
    return False
