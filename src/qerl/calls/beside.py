"""Calls beside this thread, each with a time limit: coroutines on an event loop, plain functions in threads.

The loop runs in its own thread, so calls go on while this thread decodes. A coroutine is cancelled at its
limit. A plain function runs in its own thread, which Python cannot end: the call fails at its limit, and
:class:`TimeUp` is raised in the thread, which ends as soon as it is back in Python code.

A coroutine that does not await blocks the loop and all calls on it. Code that waits for calls therefore also
checks whether the loop makes progress (:meth:`Beside.watch`), and interrupts a step that blocks it.

Given up: a call that hangs inside C (a socket without a timeout, a long sleep) cannot be interrupted outside
the main thread, and its thread is abandoned until the call returns. Such threads are counted; when there are
too many, further calls fail at once. A loop that such a call blocks is abandoned too: the calls on it are
lost, and later calls get a new loop, on which clients of the old one cannot be used.
"""

import asyncio
import contextlib
import ctypes
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

from qerl.calls.alarm import TimeUp

Result = TypeVar("Result")

AT_ONCE = 32
"""Maximum number of calls that hold a slot at the same time."""

STUCK = 64
"""Number of hanging threads at which further calls fail at once."""

GRACE_S = 0.25
"""Seconds within which a cancelled coroutine should end."""

_HELD_GRACE_S = 1.0  # seconds within which an interrupted step of the loop should end


class EndsProcess(BaseException):
    """Wraps SystemExit or KeyboardInterrupt raised by a call, which would stop the event loop.

    Attributes:
        cause: The exception that was raised.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


class StillRunsError(TimeoutError):
    """A call exceeded its time limit and may still be running."""


class Beside:
    """An event loop for calls, in a thread that is started on first use; to be used from one thread.

    Args:
        at_once, stuck: See `AT_ONCE` and `STUCK`.

    Attributes:
        slots: Semaphore with which callers limit the number of their concurrent calls.
    """

    def __init__(self, at_once: int = AT_ONCE, stuck: int = STUCK) -> None:
        self._at_once, self._max_stuck = at_once, stuck
        self.slots = asyncio.Semaphore(at_once)
        self._turning: _LoopThread | None = None
        self._open: set[Future[Any]] = set()
        self._left: list[_LoopThread | _CallThread] = []
        self._turned, self._since, self._interrupted = threading.Event(), 0.0, False

    def start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Start a coroutine, which may use :meth:`call`, and return its future.

        The future is cancelled if its loop has to be abandoned; cancelling it cancels its calls.
        """
        if self._turning is None:
            self._turning, self.slots = _LoopThread(), asyncio.Semaphore(self._at_once)
            self._turning.start()
            self._turned.set()
            weakref.finalize(self, self._turning.stop)
        for left in [*self._left]:
            left.interrupt()  # it may have swallowed the first interruption
        future = asyncio.run_coroutine_threadsafe(work, self._turning.loop)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def result(self, future: "Future[Result]", held_s: Callable[[], float]) -> Result:
        """Wait for a started coroutine, and return its result.

        Args:
            future: From :meth:`start`.
            held_s: Returns the seconds after which a step of the loop is interrupted.
        """
        while not future.done():
            self.watch(held_s())
            futures.wait([future], timeout=min(held_s() / 10, 1.0))
        return future.result()

    def watch(self, held_s: float) -> None:
        """Interrupt a step of the loop that takes longer than ``held_s`` seconds; to be called repeatedly.

        If the interrupted step does not end, the loop is abandoned.
        """
        if self._turning is None:
            return
        held = time.monotonic() - self._since
        if self._turned.is_set():
            self._turned, self._since, self._interrupted = threading.Event(), time.monotonic(), False
            self._turning.loop.call_soon_threadsafe(self._turned.set)
        elif not self._interrupted and held > held_s:
            self._interrupted, self._since = True, time.monotonic()
            self._turning.interrupt()
        elif self._interrupted and held > _HELD_GRACE_S:
            self._left.append(self._turning)
            self._leave_loop()

    async def call(self, function: Callable[[], Any], seconds: float | None) -> Any:
        """Call a function and return its result; to be awaited by coroutines given to :meth:`start`.

        Args:
            function: A plain function, called in a thread, or a coroutine function (:func:`is_async`).
            seconds: Time limit; None for no limit.

        Raises:
            TimeoutError: The call exceeded its limit; StillRunsError if it is still running, as plain
                functions always are.
            EndsProcess: The function raised an exception that ends the process.
            RuntimeError: Too many threads hang to start another.
        """
        try:
            return await self._limited(function, seconds)
        except TimeUp:
            limit = "" if seconds is None else f"no result within {seconds:g} s, and "
            raise TimeoutError(f"{limit}nothing was awaited") from None

    def close(self) -> None:
        """Cancel all calls, and stop the loop."""
        thread = self._turning
        self._leave_loop()
        if thread is not None:
            thread.join(_HELD_GRACE_S)
            thread.interrupt()  # a step that blocks the loop
            thread.join(_HELD_GRACE_S)

    async def _limited(self, function: Callable[[], Any], seconds: float | None) -> Any:
        thread = None if is_async(function) else self._start_thread(function)
        work = asyncio.ensure_future(self._awaited(function)) if thread is None else thread.outcome
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio may log it
        try:
            await asyncio.wait({work}, timeout=seconds)
            if work.done():
                return work.result()
        finally:
            if not work.done():
                work.cancel()
                if thread is not None:
                    thread.interrupt()
                    self._left.append(thread)
                await asyncio.wait({work}, timeout=GRACE_S)
        error = TimeoutError if thread is None and work.done() else StillRunsError
        raise error(f"no result within {seconds:g} s")

    async def _awaited(self, function: Callable[[], Any]) -> Any:
        """Await a coroutine function, and return its result."""
        if self._turning is None or asyncio.get_running_loop() is not self._turning.loop:  # was abandoned
            raise asyncio.CancelledError
        task = asyncio.current_task()
        try:
            return await function()
        except TimeUp:
            self._since, self._interrupted = time.monotonic(), False  # the next step gets its full time
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise _harmless(error) from error

    def _start_thread(self, function: Callable[[], Any]) -> "_CallThread":
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= self._max_stuck:
            raise RuntimeError(f"{self._max_stuck} calls hang, so no further one is made")
        thread = _CallThread(function)
        thread.start()
        return thread

    def _leave_loop(self) -> None:
        for future in [*self._open]:
            future.cancel()
        if self._turning is not None:
            self._turning.stop()
        self._turning = None


class _LoopThread(threading.Thread):
    """The thread of an event loop; when stopped, it cancels the remaining tasks."""

    def __init__(self) -> None:
        super().__init__(name="qerl-calls", daemon=True)
        self.loop, self._stopped = asyncio.new_event_loop(), False

    def run(self) -> None:
        while not self._stopped:
            with contextlib.suppress(TimeUp):  # raised in the loop itself, after the step had ended
                self.loop.run_forever()
        with contextlib.suppress(TimeUp, RuntimeError):  # interrupted, or stopped once more
            if tasks := asyncio.all_tasks(self.loop):
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=_HELD_GRACE_S))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def interrupt(self) -> None:
        """Raise TimeUp in the running step."""
        _raise_in(self)

    def stop(self) -> None:
        """Stop the loop after its current step."""
        self._stopped = True
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self.loop.call_soon_threadsafe(self.loop.stop)


class _CallThread(threading.Thread):
    """The thread of one call of a plain function, created on the event loop that waits for it.

    Attributes:
        outcome: Future of the function's result.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="qerl-call", daemon=True)
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self._loop.create_future()
        self._function = function
        self._lock, self._calling = threading.Lock(), True

    def run(self) -> None:
        with contextlib.suppress(TimeUp, RuntimeError):  # interrupted, or the loop has been closed
            try:
                tell, what = self.outcome.set_result, self._function()
            except TimeUp:
                raise
            except BaseException as error:
                tell, what = self.outcome.set_exception, _harmless(error)
            with self._lock:
                self._calling = False
            self._loop.call_soon_threadsafe(lambda: self.outcome.done() or tell(what))

    def interrupt(self) -> None:
        """Raise TimeUp in the function if it is still running."""
        with self._lock:
            if self._calling:
                _raise_in(self)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function, a partial of one, or an object whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _harmless(error: BaseException) -> BaseException:
    """Wrap an exception of a call that a future or an event loop would treat specially."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return EndsProcess(error)
    if isinstance(error, StopIteration | asyncio.CancelledError):
        return RuntimeError(f"the call raised {type(error).__name__}")
    return error


def _raise_in(thread: threading.Thread) -> None:
    # The id of a thread that has ended may have been reused by another.
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))
