"""Calls in this thread that are interrupted at their time limit.

The limit uses the process's real-time interval timer (SIGALRM). Given up:

* Signals reach only the main thread. In any other thread, and on Windows, there is no limit.
* Python runs a signal handler between two bytecodes. A single call into C that does not return (a huge
  integer power, a regular expression that backtracks for hours) is interrupted only once it returns.
* A function that catches BaseException swallows the interruption, which is therefore repeated every
  ``seconds`` until the call ends.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TimeUp(BaseException):
    """Raised in code that has exceeded its time limit.

    It is not a subclass of Exception: sympy and many reward functions catch Exception and would carry on.
    """


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of ``call()``, or interrupt it after ``seconds``.

    Where calls cannot be interrupted (:func:`can_interrupt`) there is no limit. A previously active timer and
    handler are restored, less the elapsed time.

    Raises:
        TimeoutError: The call took longer than ``seconds``.
    """
    if not can_interrupt():
        return call()
    running = False

    def ring(*_: object) -> None:
        if running:
            raise TimeUp

    started = time.monotonic()
    outer_handler = signal.signal(signal.SIGALRM, ring)
    outer_left, outer_interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        try:
            running = True
            return call()
        finally:
            # From here on until the timer is disarmed, an alarm does nothing.
            running = False
    except TimeUp:
        raise TimeoutError(f"no result within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_left:
            left = max(outer_left - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, outer_interval)


def can_interrupt() -> bool:
    """Return True in the main thread of a POSIX process, the only place where an alarm works."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
