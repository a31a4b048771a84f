"""Calls in the main thread that are interrupted when their time is up."""

import signal
import time

import pytest

from qerl.calls.alarm import call_within


def test_a_timer_that_ran_before_goes_on_with_the_time_passed_taken_off() -> None:
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"no result within 0\.1 s"):
            call_within(0.1, lambda: time.sleep(60))
        time.sleep(0.4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
    assert len(rung) == 1
    assert rung[0] - started == pytest.approx(0.3, abs=0.1)
