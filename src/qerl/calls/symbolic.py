r"""Whether two LaTeX expressions are equal by math-verify, decided in a process that ends itself in time.

What a policy writes may take for ever to evaluate: ``9^{99999999}``, ``12!!`` and ``(x+1)^{9999}`` are short
answers, and math-verify computes them inside of calls into C, which no alarm in this process interrupts
(:mod:`qerl.calls.alarm`). One such sample would hold up a run until somebody ends it. So expressions are
compared in a process of their own, one for each process that asks, started when it is first asked. It sets a
timer on its processor time before each pair, and the kernel ends it where that runs out; its memory has a
bound too. The next pair starts another one.

The time is that of the processor, of which a busy machine takes no more. Limits of whoever asks are of the
clock, and contain the start of the process, some seconds on a busy machine; one that runs out there loses
nothing but that answer, since the start goes on.

This module is what runs there too, and imports nothing of the project: starting takes as long as importing
math-verify does, a second or two.
"""

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

SECONDS = 3.0
"""Processor time for one pair; most take a hundredth of a second."""

MEMORY = 4 << 30
"""Bytes of address space."""

_READY = "ready"


class _Process:
    """A process that compares."""

    def __init__(self) -> None:
        paths = [*filter(None, sys.path), str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._replies = self._process.stdin, self._process.stdout
        self._ready = False

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_until_ready(self) -> None:
        """Wait for the start; interrupted, it goes on, and so may the next one who waits."""
        if not self._ready and self._replies.readline().strip() != _READY:
            raise RuntimeError(
                f"math-verify, which compares answers, cannot be started (exit status {self.status()}); what "
                "it printed says why."
            )
        self._ready = True

    def ask(self, question: str) -> str:
        """The reply to a question; empty where the process has ended over it."""
        try:
            with contextlib.suppress(BrokenPipeError):
                self._questions.write(question + "\n")
                self._questions.flush()
            return self._replies.readline()
        except BaseException:  # the alarm of whoever asks, after which a reply would be of a former question
            self._process.kill()
            self._process.wait()
            raise

    def status(self) -> int:
        """Exit status, once it has ended."""
        return self._process.wait()

    def forget(self) -> None:
        """In a fork of the process that has started it, which alone asks and waits for it."""
        for pipe in (self._questions, self._replies):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.returncode = 0


_LOCK = threading.Lock()
_held: list[_Process] = []
_warned: list[str] = []


def equal_expressions(answer: str, reference: str) -> bool:
    """True if math-verify parses both and finds them equal; false too where it takes longer than `SECONDS`
    or more than `MEMORY`, which is logged once.

    Args:
        answer, reference: LaTeX without the dollar signs around it.

    Raises:
        ValueError: math-verify failed, or something else than its own limits ended it, twice.
        RuntimeError: It cannot be started.
    """
    question = json.dumps([answer, reference])
    with _LOCK:
        for again in (True, False):
            if not _held or _held[0].ended:
                _held[:] = [_Process()]
            process = _held[0]
            process.wait_until_ready()
            line = process.ask(question)
            if line:
                reply = json.loads(line)
                break
            reply = {"ended": process.status()}
            _held[:] = [_Process()]  # it starts while others are busy
            if reply["ended"] == -signal.SIGPROF:
                break
            if not again:
                raise ValueError(
                    f"math-verify ended with status {reply['ended']} over {answer[:80]!r}, twice"
                )
    if "ended" in reply and not _warned:
        _warned.append(answer)
        logger.warning(
            "The answer %.80r cannot be compared within %g s and %d GiB, and is wrong; later ones are not "
            "mentioned.",
            answer,
            SECONDS,
            MEMORY >> 30,
        )
    if "error" in reply:
        raise ValueError(reply["error"])
    return bool(reply.get("equal"))


def _after_fork() -> None:
    """A forked process starts one of its own: two that read one pipe would get each other's replies."""
    global _LOCK
    _LOCK = threading.Lock()
    for process in _held:
        process.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def _serve(questions: TextIO, replies: TextIO, seconds: float) -> None:
    """Answer questions until there are no more."""
    from math_verify import parse, verify

    # It warns that its timeouts are off, which is deliberate: the timer is the only one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def equal(answer: str, reference: str) -> bool:
        gold, found = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
        return bool(verify(gold, found, timeout_seconds=None))

    equal("1+x", "x+1")  # what is imported by the first call
    for name in (signal.SIGINT, signal.SIGTERM):  # they are the parent's affair, with which this one ends
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # not every system has this bound
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(_READY, file=replies, flush=True)
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply: dict[str, object] = {"equal": equal(*json.loads(line))}
        except MemoryError:
            reply = {"ended": "out of memory"}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    _replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no reply
    _serve(sys.stdin, _replies, float(sys.argv[1]))
