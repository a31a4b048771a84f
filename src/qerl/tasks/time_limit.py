"""A call that is interrupted when its time is up.

Time limits use the process's real-time interval timer (SIGALRM). What that cannot do:

* Signals reach the main thread alone. In any other thread, and on Windows, there is no limit.
* Python runs the handler between two bytecodes. One call into C that does not return (a huge integer power, a
  regular expression that backtracks for hours, a socket without timeout inside a C library) is interrupted
  only when it returns.
* A function that catches BaseException swallows the interruption; it is repeated every ``seconds`` until the
  call ends.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class _TimeUpError(BaseException):
    # Not an Exception: sympy and many reward functions catch those and would carry on.
    pass


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """Result of ``call()``, interrupted after ``seconds`` where this thread can be (the main thread, POSIX).

    A timer and handler that were active before are put back, with the time that has passed taken off.

    Raises:
        TimeoutError: The time ran out.
    """
    if not can_interrupt():
        return call()
    running = True

    def on_alarm(_signum: int, _frame: object) -> None:
        if running:
            raise _TimeUpError

    started = time.monotonic()
    outer_handler = signal.signal(signal.SIGALRM, on_alarm)
    outer_left, outer_interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        try:
            return call()
        finally:
            # An alarm between the call's return and the disarming below then finds nothing to stop.
            running = False
    except _TimeUpError:
        raise TimeoutError(f"no result within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_left:
            left = max(outer_left - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, outer_interval)


def can_interrupt() -> bool:
    """Whether a time limit works here: in the main thread of a POSIX process."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
