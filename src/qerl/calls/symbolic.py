r"""Comparison of two LaTeX expressions by math-verify, in a subprocess with limits on CPU time and memory.

Answers of a policy may take forever to evaluate: ``9^{99999999}``, ``12!!`` and ``(x+1)^{9999}`` are short,
and math-verify computes them inside calls into C, which no alarm in this process interrupts
(:mod:`qerl.calls.alarm`). One such sample would block a run until it is killed by hand. So expressions are
compared in a subprocess, one per calling process, started at the first call. It sets a timer on its CPU time
before each pair, and the kernel kills it when the timer expires; its memory is limited too. The next pair
starts another subprocess.

The limit is on CPU time, which does not grow on a busy machine. Callers' own limits are on wall-clock time
and include the start of the subprocess, some seconds on a busy machine; a caller whose limit expires then
loses only that answer, since the start goes on.

The subprocess runs this module, which imports nothing of the project: starting takes as long as importing
math-verify, a second or two.
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
"""Maximum CPU time per pair; most pairs take a hundredth of a second."""

MEMORY = 4 << 30
"""Maximum address space in bytes."""

_READY = "ready"


class _Process:
    """A subprocess that compares expressions."""

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
        """Wait until the subprocess is ready; an interrupted wait can be repeated, as the start goes on."""
        if not self._ready and self._replies.readline().strip() != _READY:
            raise RuntimeError(
                f"math-verify, which compares answers, cannot be started (exit status {self.status()}); its "
                "output says why."
            )
        self._ready = True

    def ask(self, question: str) -> str:
        """Send a question and return the reply; empty if the subprocess ended before replying."""
        try:
            with contextlib.suppress(BrokenPipeError):
                self._questions.write(question + "\n")
                self._questions.flush()
            return self._replies.readline()
        except BaseException:  # the caller's alarm; a later reply would answer an earlier question
            self._process.kill()
            self._process.wait()
            raise

    def status(self) -> int:
        """Wait for the subprocess to end, and return its exit status."""
        return self._process.wait()

    def forget(self) -> None:
        """Close the pipes in a forked child; only the process that started the subprocess uses it."""
        for pipe in (self._questions, self._replies):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.returncode = 0


_LOCK = threading.Lock()
_held: list[_Process] = []
_warned: list[str] = []


def equal_expressions(answer: str, reference: str) -> bool:
    """Return True if math-verify parses both expressions and finds them equal.

    The result is False if this takes more than `SECONDS` or `MEMORY`, which is logged once.

    Args:
        answer, reference: LaTeX without the surrounding dollar signs.

    Raises:
        ValueError: math-verify failed, or its subprocess died twice for another reason than its time limit.
        RuntimeError: The subprocess cannot be started.
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
            _held[:] = [_Process()]  # starts while the caller does other work
            if reply["ended"] == -signal.SIGPROF:
                break
            if not again:
                raise ValueError(
                    f"math-verify ended with status {reply['ended']} over {answer[:80]!r}, twice"
                )
    if "ended" in reply and not _warned:
        _warned.append(answer)
        logger.warning(
            "The answer %.80r cannot be compared within %g s and %d GiB, and counts as wrong; later such "
            "answers are not logged.",
            answer,
            SECONDS,
            MEMORY >> 30,
        )
    if "error" in reply:
        raise ValueError(reply["error"])
    return bool(reply.get("equal"))


def _after_fork() -> None:
    """Make a forked child start its own subprocess: two readers of one pipe would mix up replies."""
    global _LOCK
    _LOCK = threading.Lock()
    for process in _held:
        process.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def _serve(questions: TextIO, replies: TextIO, seconds: float) -> None:
    """Answer questions until the input ends."""
    from math_verify import parse, verify

    # math-verify warns that its timeouts are off, which is deliberate: the timer below is the only one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def equal(answer: str, reference: str) -> bool:
        gold, found = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
        return bool(verify(gold, found, timeout_seconds=None))

    equal("1+x", "x+1")  # triggers lazy imports
    for name in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and this process ends with it
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
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
    _replies, sys.stdout = sys.stdout, sys.stderr  # output that a library prints is no reply
    _serve(sys.stdin, _replies, float(sys.argv[1]))
