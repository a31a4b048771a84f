"""Calls of tools beside the decoding, each with a time limit, none of which can hold up a run.

A call runs in a thread of its own. Python cannot end a thread, so one whose time is up is left behind: its
row gets an error at once, and an exception is raised in the thread, which ends it as soon as it is back in
Python code. What hangs inside of C (a socket without a timeout, a long sleep) stays until it returns. Such
threads are counted, and where there are too many of them further calls fail at once instead of starting one
more: a tool that always hangs costs a bounded number of threads.

Coroutine functions run on one event loop, because a client that a tool keeps between calls belongs to its
loop, and are cancelled at the limit.

The calls of one turn run one after the other, since they act on the same environment; those of different
trajectories at the same time. A tool that several trajectories share has to bear being called from several
threads.

Which rows decode together decides the last bits of their logits, so a run that is repeated or resumed has to
answer the same turns at the same time. For tools that answer at once this is made so: whoever collects waits
a moment for the turns that have just ended, and gets answers in the order in which they were asked for. A
tool that was late once is not waited for again.
"""

import asyncio
import contextlib
import ctypes
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qerl.agents.text import whole
from qerl.errors import QeRLError

THREADS = 32
"""Turns whose calls run at the same time."""

STUCK = 64
"""Threads that may hang before further calls fail at once."""

PATIENCE = 1.0
"""Seconds that `ToolPool.collect` waits for turns that have just ended, unless their tools were late once."""

_GRACE = 0.25  # seconds that a coroutine has to be cancelled in


@dataclass(frozen=True)
class Call:
    """A call to make.

    Attributes:
        name: By which the model called it.
        function: What to call; None where there is no such tool.
        arguments: By name.
        error: Why there is nothing to call.
    """

    name: str
    function: Callable[..., Any] | None
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Answer:
    """What came of a call.

    Attributes:
        name: Of the call.
        text: What it returned as text, cut to the limit, or the error; None where it returned None.
        failed: Whether it raised, was unknown or ran out of time.
        hangs: Whether it still runs.
    """

    name: str
    text: str | None
    failed: bool = False
    hangs: bool = False


class _TimeUpError(BaseException):
    # Raised in a thread that hangs; not an Exception, which tools catch.
    pass


class _StillRunsError(TimeoutError):
    # Of a coroutine that is not cancelled at its limit.
    pass


class _Job(threading.Thread):
    """The calls of one turn, one after the other."""

    def __init__(self, number: int, key: int, calls: Sequence[Call], pool: "ToolPool") -> None:
        super().__init__(name="qerl-tools", daemon=True)
        self.number, self.key, self.calls, self._pool = number, key, calls, pool
        self.answers: list[Answer] = []
        self.since = 0.0  # when the present call began
        self.left_behind = False

    def run(self) -> None:
        try:
            for call in self.calls:
                self.since = time.monotonic()
                answer = self._pool.answer(call)
                if self.left_behind:
                    return
                self.answers.append(answer)
            self._pool.finished.put(self)
        except _TimeUpError:
            pass

    def leave_behind(self) -> None:
        """Let the thread end when it can."""
        self.left_behind = True
        # The number of a thread that has ended may be another one's by now.
        if self.ident is not None and self.is_alive() and len(self.answers) < len(self.calls):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.ident), ctypes.py_object(_TimeUpError)
            )


class ToolPool:
    """Runs calls of tools; used from one thread.

    Args:
        timeout: Seconds that a call may take.
        output_limit: Characters of an answer; what is longer is cut.
        loop: A running event loop for coroutine functions; None makes one when it is needed.
        threads, stuck, patience: See `THREADS`, `STUCK` and `PATIENCE`.
    """

    def __init__(
        self,
        timeout: float,
        output_limit: int,
        loop: asyncio.AbstractEventLoop | None = None,
        threads: int = THREADS,
        stuck: int = STUCK,
        patience: float = PATIENCE,
    ) -> None:
        if not 0 < timeout < float("inf"):
            raise QeRLError(f"tool_timeout is {timeout}; it must be a number of seconds above 0.")
        if output_limit < 1:
            raise QeRLError(
                f"tool_output_limit is {output_limit}; it must be a number of characters above 0."
            )
        self._timeout, self._limit = timeout, output_limit
        self._threads, self._stuck_limit = threads, stuck
        self._patience = min(patience, timeout + _GRACE)
        self._loop = loop
        self._own_loop: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._left: list[_Job] = []
        self._fresh: list[_Job] = []  # submitted since the last `collect`
        self._late: set[str] = set()  # names of tools that were
        self._submitted = 0
        self.finished: queue.SimpleQueue[_Job] = queue.SimpleQueue()

    @property
    def pending(self) -> int:
        """Turns that have not been answered."""
        return len(self._waiting) + len(self._running)

    @property
    def stuck(self) -> int:
        """Threads that were left behind and still run."""
        self._left = [job for job in self._left if job.is_alive()]
        return len(self._left)

    def submit(self, key: int, calls: Sequence[Call]) -> None:
        """Make the calls of a turn; `collect` gives the answers under the same key."""
        self._submitted += 1
        job = _Job(self._submitted, key, calls, self)
        self._waiting.append(job)
        self._fresh.append(job)
        self._start()

    def collect(self, wait: bool) -> list[tuple[int, list[Answer]]]:
        """The turns that have been answered since, or ran out of time, in the order of `submit`.

        Args:
            wait: Return only when there is one, if any is pending.
        """
        done = self._collect_prompt_ones()
        while True:
            done += self._overdue() + self._finished(0.0)
            if done or not (wait and self.pending):
                break
            done += self._finished(self._next_deadline())
        self._start()
        return [(job.key, answers) for job, answers in sorted(done, key=lambda each: each[0].number)]

    def _collect_prompt_ones(self) -> list[tuple[_Job, list[Answer]]]:
        """What is answered of the turns that were submitted last, after a moment's patience."""
        expected = [job for job in self._fresh if not self._late & {call.name for call in job.calls}]
        self._fresh = []
        until, done = time.monotonic() + self._patience, []
        while expected and (left := until - time.monotonic()) > 0:
            done += self._finished(left)
            expected = [job for job in expected if job in self._running or job in self._waiting]
        for job in expected:
            self._late |= {call.name for call in job.calls[len(job.answers) :]}
        return done

    def _finished(self, seconds: float) -> list[tuple[_Job, list[Answer]]]:
        """The turns that have been answered, waiting so long for the first one."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self.finished.get(block=seconds > 0, timeout=seconds or None)
                seconds = 0.0
                if job in self._running:  # else it was late, and has been answered for
                    self._running.remove(job)
                    done.append((job, job.answers))
        self._start()
        return done

    def abandon(self) -> None:
        """Give up all calls that are pending."""
        self._waiting.clear()
        self._fresh = []
        for job in self._running:
            self._leave(job)
        self._running = []

    def close(self) -> None:
        """Give up all calls, and end the event loop that was made here."""
        self.abandon()
        if self._own_loop is not None:
            loop, thread = self._own_loop
            loop.call_soon_threadsafe(loop.stop)
            thread.join(self._timeout)
            if not thread.is_alive():
                loop.close()
            self._own_loop = self._loop = None

    def answer(self, call: Call) -> Answer:
        """What comes of a call, made in this thread; its time is watched by another."""
        if call.function is None:
            return Answer(call.name, self._cut(_error(call.error)), failed=True)
        try:
            if inspect.iscoroutinefunction(call.function):
                result = self._await(call.function, call.arguments)
            else:
                result = call.function(**call.arguments)
            return Answer(call.name, self._cut(result))
        except _TimeUpError:
            raise
        except BaseException as error:  # a tool that calls sys.exit ends its call, not the thread
            text = self._words(error)
            hangs = isinstance(error, _StillRunsError)
            return Answer(call.name, self._cut(_error(text)), failed=True, hangs=hangs)

    def _words(self, error: BaseException) -> str:
        """What an exception says; some say nothing, and a tool's own may fail to."""
        text = ""
        with contextlib.suppress(Exception):
            text = str(error)
        if not text and isinstance(error, TimeoutError):
            text = f"no result within {self._timeout:g} s"
        return text or type(error).__name__

    def _await(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(self._timeout):
                return await function(**arguments)

        future = asyncio.run_coroutine_threadsafe(limited(), self._loop or self._make_loop())
        try:
            return future.result(self._timeout + _GRACE / 2)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise _StillRunsError from error

    def _cut(self, result: Any) -> str | None:
        if result is None:
            return None
        text = whole(str(result))
        left_out = len(text) - self._limit
        return text if left_out <= 0 else f"{text[: self._limit]} [{left_out} more characters]"

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._threads:
            job = self._waiting.popleft()
            self._running.append(job)
            if self.stuck >= self._stuck_limit:
                text = _error(f"{self._stuck_limit} calls of tools hang, so no further one is made")
                job.answers = [Answer(call.name, text, failed=True) for call in job.calls]
                self.finished.put(job)
                continue
            job.since = time.monotonic()
            job.start()

    def _overdue(self) -> list[tuple[_Job, list[Answer]]]:
        """The turns of which a call has run out of time, with an error for it and for those behind it."""
        late = []
        for job in [*self._running]:
            answers = [*job.answers]
            if len(answers) < len(job.calls) and self._time_left(job) <= 0:
                self._running.remove(job)
                self._leave(job)
                text = _error(f"no result within {self._timeout:g} s")
                late.append((job, answers + [
                    Answer(call.name, text, failed=True, hangs=True) for call in job.calls[len(answers) :]
                ]))  # fmt: skip
        return late

    def _leave(self, job: _Job) -> None:
        job.leave_behind()
        self._left.append(job)

    def _time_left(self, job: _Job) -> float:
        return job.since + self._timeout + _GRACE - time.monotonic()

    def _next_deadline(self) -> float:
        """Seconds until the next call is out of time, a little above 0 at least."""
        return max(min((self._time_left(job) for job in self._running), default=0.0), 1e-3)

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        """The pool's event loop, in a thread; several calls may be the first."""
        with _LOOP_LOCK:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="qerl-tools-loop", daemon=True)
                thread.start()
                self._loop, self._own_loop = loop, (loop, thread)
            return self._loop


_LOOP_LOCK = threading.Lock()


def _error(text: str) -> str:
    """What the model reads of a failure."""
    return str({"error": text})
