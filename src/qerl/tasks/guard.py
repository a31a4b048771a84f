"""A reward function that raises or hangs costs its sample a zero, not the run.

A guarded function is called with the whole batch, as TRL calls it. Only if that call raises, runs out of time
or returns nonsense is it called again sample by sample, each with its own time limit; the samples that fail
score 0, the failure is logged once for each function, and how many failed is reported with every batch
through TRL's ``log_metric`` as ``rewards/<name>/failed``.

Time limits use the process's real-time interval timer (SIGALRM). What that cannot do:

* Signals reach the main thread alone. In any other thread, and on Windows, there is no limit; a warning says
  so.
* Python runs the handler between two bytecodes. One call into C that does not return (a huge integer power, a
  regular expression that backtracks for hours, a socket without timeout inside a C library) is interrupted
  only when it returns.
* A function that catches BaseException swallows the interruption; it is repeated every ``timeout_s`` until
  the call ends.

What was given up: the second call repeats side effects, and a reward that compares the samples of a batch
with each other sees one sample at a time there.
"""

import functools
import inspect
import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from qerl.errors import QeRLError

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., list[float | None]]
"""``f(prompts, completions, answer, **columns) -> rewards``, one a completion; None where it does not
apply.
"""

_NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric"})


class _TimeUpError(BaseException):
    # Not an Exception: sympy and many reward functions catch those and would carry on.
    pass


def call_within(seconds: float, call: Callable[[], Any]) -> Any:
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


def guarded(func: RewardFunction, timeout_s: float = 10.0) -> RewardFunction:
    """Wrap a reward function so that its failures cost samples and not the run.

    Args:
        func: Reward function with TRL's signature; its ``__name__`` is kept, for TRL logs by it.
        timeout_s: Seconds for the call with the whole batch, and again for each sample if that call fails.

    Raises:
        QeRLError: ``func`` is a coroutine function; a time limit by signal does not apply to those.
    """
    if inspect.iscoroutinefunction(func):
        raise QeRLError(f"Reward function {func.__name__!r} is async; write it as a plain function.")
    name = func.__name__
    said: set[str] = set()

    @functools.wraps(func)
    def call(prompts: list, completions: list, **columns: Any) -> list[float | None]:
        if not can_interrupt() and "no limit" not in said:
            said.add("no limit")
            logger.warning("Reward function %r runs without time limit: this is not the main thread.", name)
        failures: list[Exception] = []
        try:
            batch = functools.partial(func, prompts=prompts, completions=completions, **columns)
            rewards = _checked(call_within(timeout_s, batch), len(completions))
        except Exception:
            rewards = _sample_by_sample(func, timeout_s, prompts, completions, columns, failures)
        if failures and "failed" not in said:
            said.add("failed")
            logger.warning(
                "Reward function %r failed on %d of %d samples, which score 0 (first failure: %s: %s). Later "
                "failures are counted in rewards/%s/failed.",
                *(name, len(failures), len(completions), type(failures[0]).__name__, failures[0], name),
            )
        if "log_metric" in columns:
            columns["log_metric"](f"rewards/{name}/failed", float(len(failures)))
        return rewards

    return call


def _sample_by_sample(
    func: RewardFunction,
    timeout_s: float,
    prompts: list,
    completions: list,
    columns: dict[str, Any],
    failures: list[Exception],
) -> list[float | None]:
    rewards: list[float | None] = []
    # The call that failed may have logged its extra columns already; a second set would be out of line.
    shared = {key: columns[key] for key in _NOT_COLUMNS & columns.keys()}
    if "log_extra" in shared:
        shared["log_extra"] = lambda *_: None
    for i in range(len(completions)):
        own = {key: [values[i]] for key, values in columns.items() if key not in _NOT_COLUMNS}
        sample = functools.partial(func, prompts=[prompts[i]], completions=[completions[i]], **own, **shared)
        try:
            rewards += _checked(call_within(timeout_s, sample), 1)
        except Exception as error:
            failures.append(error)
            rewards.append(0.0)
    return rewards


def _checked(rewards: Any, expected: int) -> list[float | None]:
    values = [None if reward is None else float(reward) for reward in rewards]
    if len(values) != expected:
        raise ValueError(f"{len(values)} rewards for {expected} completions")
    if any(value is not None and not math.isfinite(value) for value in values):
        raise ValueError("a reward is not finite")
    return values
