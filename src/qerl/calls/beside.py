"""Calls beside this thread, each with a time limit: coroutines on an event loop, plain functions in threads.

The loop runs in a thread of its own, so calls go on while this thread decodes. A coroutine is cancelled at
its limit. A plain function runs in a thread of its own, which Python cannot end: the call fails at its limit,
and :class:`TimeUp` is raised in the thread, which ends as soon as it is back in Python code.

A coroutine that does not await holds up the loop and all calls on it. Whatever waits for calls therefore also
watches whether the loop turns (:meth:`Beside.watch`), and interrupts the step that holds it up.

Given up: a call that hangs inside of C (a socket without a timeout, a long sleep) cannot be interrupted
outside of the main thread, and is left behind until it returns. Such threads are counted, and where there are
too many of them further calls fail at once. A loop that such a call holds up is left behind too: the calls on
it are lost, and the next ones get a new loop, to which clients of the old one do not belong.
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
"""Calls that hold a slot at the same time."""

STUCK = 64
"""Threads that may hang before further calls fail at once."""

GRACE_S = 0.25
"""Seconds that a coroutine has to be cancelled in."""

_HELD_GRACE_S = 1.0  # that a step of the loop has to end in, once it is interrupted


class EndsProcess(BaseException):
    """Wraps SystemExit or KeyboardInterrupt raised by a call, which a loop would obey.

    Attributes:
        cause: The exception that was raised.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


class StillRunsError(TimeoutError):
    """The time of a call is up, and it may still be running."""


class Beside:
    """An event loop for calls, in a thread that is started when it is needed; used from one thread.

    Args:
        at_once, stuck: See `AT_ONCE` and `STUCK`.

    Attributes:
        slots: Semaphore for callers that bound how many of their calls go on at once.
    """

    def __init__(self, at_once: int = AT_ONCE, stuck: int = STUCK) -> None:
        self._at_once, self._max_stuck = at_once, stuck
        self.slots = asyncio.Semaphore(at_once)
        self._turning: _LoopThread | None = None
        self._open: set[Future[Any]] = set()
        self._left: list[_LoopThread | _CallThread] = []
        self._turned, self._since, self._interrupted = threading.Event(), 0.0, False

    def start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """The future of a coroutine, which begins now and may use :meth:`call`.

        It is cancelled if its loop had to be left behind; cancelling it gives up its calls.
        """
        if self._turning is None:
            self._turning, self.slots = _LoopThread(), asyncio.Semaphore(self._at_once)
            self._turning.start()
            self._turned.set()
            weakref.finalize(self, self._turning.stop)
        for left in [*self._left]:
            left.interrupt()  # it may have swallowed the first one
        future = asyncio.run_coroutine_threadsafe(work, self._turning.loop)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def result(self, future: "Future[Result]", held_s: Callable[[], float]) -> Result:
        """The result of a coroutine that was started, once it has ended.

        Args:
            future: Of :meth:`start`.
            held_s: Gives the seconds after which a step of the loop is interrupted.
        """
        while not future.done():
            self.watch(held_s())
            futures.wait([future], timeout=min(held_s() / 10, 1.0))
        return future.result()

    def watch(self, held_s: float) -> None:
        """Interrupt a step of the loop that takes longer than ``held_s`` seconds; called again and again.

        If it does not end then, the loop is left behind.
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
        """The result of a function, or of the coroutine that it makes; awaited within :meth:`start`.

        Args:
            function: Plain, called in a thread, or a coroutine function (:func:`is_async`).
            seconds: Time limit; None for none.

        Raises:
            TimeoutError: Its time is up; StillRunsError if it has not ended yet, as plain functions have not.
            EndsProcess: It raised an exception that ends the process.
            RuntimeError: Too many calls hang for another thread.
        """
        try:
            return await self._limited(function, seconds)
        except TimeUp:
            limit = "" if seconds is None else f"no result within {seconds:g} s, and "
            raise TimeoutError(f"{limit}nothing was awaited") from None

    def close(self) -> None:
        """Give up all calls, and end the loop."""
        thread = self._turning
        self._leave_loop()
        if thread is not None:
            thread.join(_HELD_GRACE_S)
            thread.interrupt()  # a step that holds it up
            thread.join(_HELD_GRACE_S)

    async def _limited(self, function: Callable[[], Any], seconds: float | None) -> Any:
        thread = None if is_async(function) else self._start_thread(function)
        work = asyncio.ensure_future(self._awaited(function)) if thread is None else thread.outcome
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio may log it
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
        """The result of a coroutine function."""
        if self._turning is None or asyncio.get_running_loop() is not self._turning.loop:  # it is left behind
            raise asyncio.CancelledError
        task = asyncio.current_task()
        try:
            return await function()
        except TimeUp:
            self._since, self._interrupted = time.monotonic(), False  # others' steps have their own time
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
    """The thread of an event loop, which turns until it is stopped, then cancels what is left."""

    def __init__(self) -> None:
        super().__init__(name="qerl-calls", daemon=True)
        self.loop, self._stopped = asyncio.new_event_loop(), False

    def run(self) -> None:
        while not self._stopped:
            with contextlib.suppress(TimeUp):  # raised in the loop itself, as the step that was meant ended
                self.loop.run_forever()
        with contextlib.suppress(TimeUp, RuntimeError):  # interrupted, or stopped once more
            if tasks := asyncio.all_tasks(self.loop):
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=_HELD_GRACE_S))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def interrupt(self) -> None:
        """Raise TimeUp in the step that goes on."""
        _raise_in(self)

    def stop(self) -> None:
        """End the loop once it turns."""
        self._stopped = True
        with contextlib.suppress(RuntimeError):  # it has been closed
            self.loop.call_soon_threadsafe(self.loop.stop)


class _CallThread(threading.Thread):
    """One call of a plain function, made on the loop that waits for it.

    Attributes:
        outcome: Future of its result.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="qerl-call", daemon=True)
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Any] = self._loop.create_future()
        self._function = function
        self._lock, self._calling = threading.Lock(), True

    def run(self) -> None:
        with contextlib.suppress(TimeUp, RuntimeError):  # it is late, or the loop has been closed
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
        """Raise TimeUp in the function if it still runs."""
        with self._lock:
            if self._calling:
                _raise_in(self)


def is_async(function: Callable[..., Any]) -> bool:
    """True for a coroutine function, a partial of one, or an object whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _harmless(error: BaseException) -> BaseException:
    """The exception of a call in a form that neither a future nor a loop takes for its own."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return EndsProcess(error)
    if isinstance(error, StopIteration | asyncio.CancelledError):
        return RuntimeError(f"the call raised {type(error).__name__}")
    return error


def _raise_in(thread: threading.Thread) -> None:
    # The number of a thread that has ended may be another one's by now.
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))
