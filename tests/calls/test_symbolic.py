"""Comparing expressions ends in time, whatever they are, and the next pair is compared as if nothing was."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from qerl.calls import symbolic
from qerl.calls.alarm import call_within
from qerl.calls.symbolic import equal_expressions
from qerl.tasks.answers import equal

pytestmark = pytest.mark.slow


@pytest.fixture
def soon(monkeypatch):
    """Half a second for a pair, in a process of its own."""
    monkeypatch.setattr(symbolic, "SECONDS", 0.5)
    monkeypatch.setattr(symbolic, "_held", [])


def test_what_takes_for_ever_equals_nothing(soon, caplog, monkeypatch):
    endless = "12!!"
    monkeypatch.setattr(symbolic, "_warned", [])
    assert equal_expressions(r"\frac{1}{2}", "0.5")
    assert not equal(endless, "12")
    assert f"The answer {endless!r} cannot be compared within 0.5 s and 4 GiB" in caplog.text
    assert equal_expressions(r"\frac{1}{2}", "0.5") and not equal_expressions(r"\frac{1}{2}", "0.4")
    assert not equal(endless + "+1", "12") and len(caplog.records) == 1


def test_a_reply_is_never_that_of_a_former_pair():
    assert equal_expressions("x+1", "1+x")
    with pytest.raises(TimeoutError):
        call_within(0.5, lambda: equal_expressions(r"9^{99999999}", "12"))
    assert equal_expressions("x+1", "1+x") and not equal_expressions("x+1", "x")


def test_a_forked_process_has_replies_of_its_own():
    assert equal_expressions("x+1", "1+x")
    parent = symbolic._held[0]
    child = os.fork()
    if not child:
        right = not symbolic._held and equal_expressions("y+1", "1+y") and not equal_expressions("y", "x")
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert equal_expressions("x+1", "1+x") and symbolic._held == [parent] and not parent.ended


def test_threads_and_whoever_ends_the_process_change_no_reply(soon):
    def right(_):
        return equal_expressions(r"\frac{1}{2}", "0.5")

    with ThreadPoolExecutor(4) as pool:
        endless = pool.submit(equal_expressions, "12!!", "12")
        found = list(pool.map(right, range(40)))
        os.kill(symbolic._held[0]._process.pid, signal.SIGTERM)
        found += list(pool.map(right, range(20)))
        os.kill(symbolic._held[0]._process.pid, signal.SIGKILL)
        found += list(pool.map(right, range(20)))
    assert all(found) and not endless.result()


def test_what_cannot_be_started_says_so(monkeypatch):
    monkeypatch.setattr(symbolic, "_held", [])
    monkeypatch.setattr(symbolic.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"cannot be started \(exit status 1\)"):
        equal_expressions("x", "y")
