"""Agents in a subprocess, beside the process that runs the engine.

A client of OpenAI's API takes some milliseconds of CPU time for a request, and in the engine's process it
holds the GIL for all of them, so that the thread that launches the engine's work waits. Here all agents share
an interpreter of their own: coroutines share an event loop, and plain functions have threads, as in
:mod:`qerl.calls.beside`. An agent's arguments are sent there as a pickle; a reward or the first line of an
error comes back.

The process is started when an agent is first called, and executes the agent's file anew, as another module.
It is kept for all rollouts, and so are clients that the file creates. If it ends, the trajectories running in
it fail, and the next agent starts another process. It exits when its standard input is closed, and so with
its parent.

This module also runs in the subprocess, and imports neither torch nor transformers.
"""

import asyncio
import contextlib
import functools
import inspect
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qerl.calls.beside import GRACE_S, Beside, EndsProcess, is_async
from qerl.errors import QeRLError, first_line
from qerl.user_code import load_object

_LOOK_S = 0.2
"""Seconds between two checks whether an agent blocks the shared event loop."""

_START_S, _END_S = 30.0, 2.0
"""Seconds allowed for starting the process and importing an agent's file, and for its exit."""

_BEGIN = "import sys; sys.path[:] = sys.argv[1:]; from qerl.agents import process; process.main()"
"""The program of the process; its arguments are `sys.path`."""

_is_of_agents = False  # whether this process is the one that runs agents


@dataclass(frozen=True)
class EndpointOf:
    """The endpoint of one trajectory, as its agent receives it.

    Attributes:
        base_url: URL of the endpoint including the version, as OpenAI's clients take it.
        api_key: Key of this trajectory alone, valid until the trajectory ends.
        model: The name of the policy.
    """

    base_url: str
    api_key: str
    model: str


Agent = Callable[[EndpointOf, dict[str, Any]], Any]
"""A function or coroutine function of an endpoint and the columns of a row. It returns the reward, or None if
the reward is sent to the endpoint (`POST /v1/reward`), now or later."""


@dataclass(frozen=True)
class Ran:
    """The outcome of an agent's run.

    Attributes:
        reward: The returned reward; None if the agent returned None or failed.
        failure: Type and first line of the exception; empty if the agent returned.
        late: Whether the agent timed out.
    """

    reward: float | None = None
    failure: str = ""
    late: bool = False


async def run(beside: Beside, agent: Agent, endpoint: EndpointOf, row: dict[str, Any], seconds: float) -> Ran:
    """Run an agent in a coroutine of `Beside.start`; SystemExit and KeyboardInterrupt count as failures.

    Args:
        beside: Makes the call.
        agent, endpoint, row: The agent and its arguments.
        seconds: Time limit of the agent.
    """

    async def awaited() -> Any:
        return await agent(endpoint, row)

    def plain() -> Any:
        return agent(endpoint, row)

    try:
        reward = await beside.call(awaited if is_async(agent) else plain, seconds)
        return Ran(None if reward is None else float(reward))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        cause = error.cause if isinstance(error, EndsProcess) else error
        failure = f"{type(cause).__name__}: {first_line(cause)}"
        return Ran(failure=failure, late=isinstance(error, TimeoutError))


def named(agent: Agent) -> str:
    """Return the name by which `load_object` finds an agent in another process: ``PATH.py:NAME``.

    Raises:
        QeRLError: The agent is no function at the top of a file, or this process is the one that runs agents.
    """
    if _is_of_agents:
        raise QeRLError(
            "Importing the agent's file starts a run, and the agents' process imports it; put the code that "
            'starts the run under `if __name__ == "__main__":`.'
        )
    name, file = getattr(agent, "__qualname__", ""), None
    if inspect.isfunction(agent):
        file = inspect.getsourcefile(inspect.unwrap(agent))  # a decorator is another file's
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise QeRLError(
            f"The agent {name or agent!r} cannot run in a separate process, which imports it by file and "
            "name; pass a function that is defined at the top of a file, or set process: false."
        )
    return f"{Path(file).resolve()}:{name}"


class _Process:
    """A subprocess that runs agents, and the agents running in it."""

    def __init__(self) -> None:
        # As arguments: PYTHONPATH would reach programs that agents start, perhaps of another Python.
        paths = [*filter(None, sys.path), str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGIN, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._running: dict[int, Future[Ran]] = {}
        self._lock, self._count, self._over, self._hung = threading.Lock(), 0, False, False
        self._questions: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        for work in (self._ask, self._listen):
            threading.Thread(target=work, name="qerl-agents", daemon=True).start()

    @property
    def ended(self) -> bool:
        """True if the process has exited."""
        return self._process.poll() is not None

    def begin(self, *asked: Any) -> "Future[Ran]":
        """Start an agent and return the future of its outcome; `_serve` reads the arguments."""
        text, found = pickle.dumps(asked), Future[Ran]()
        with self._lock:
            self._count += 1
            self._running[self._count] = found
            self._questions.put((self._count, text))
            over = self._over
        if over:
            self._lose()
        return found

    def _ask(self) -> None:
        """Write requests to the pipe, in a thread: a process that hangs reads none, and its pipe fills up."""
        assert self._process.stdin is not None
        # The process may have exited, which `_listen` reports.
        with contextlib.suppress(OSError), self._process.stdin as questions:
            while (question := self._questions.get()) is not None:
                pickle.dump(question, questions)
                questions.flush()

    def _listen(self) -> None:
        """Read the outcomes of agents until the process exits."""
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            while True:
                number, ran = pickle.load(self._process.stdout)
                with self._lock:
                    found = self._running.pop(number, None)
                if found is not None and found.set_running_or_notify_cancel():
                    found.set_result(ran)
        self._process.wait()
        self._questions.put(None)
        self._lose()

    def _lose(self) -> None:
        why = "hung and was ended" if self._hung else f"ended with status {self._process.returncode}"
        with self._lock:
            lost, self._running, self._over = self._running, {}, True
        for found in lost.values():
            if found.set_running_or_notify_cancel():
                found.set_result(Ran(failure=f"the process of the agents {why}"))

    def close(self) -> None:
        """End the process and the agents in it."""
        self._questions.put(None)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self, hung: bool = False) -> None:
        """Kill the process, and wait for its exit.

        Args:
            hung: Whether it is killed because it hung, which the failures of its agents then state.
        """
        self._hung = hung
        self._process.kill()
        self._process.wait()


class AgentProcess:
    """Runs agents in a subprocess, which is started on demand; thread-safe."""

    def __init__(self) -> None:
        self._lock, self._held = threading.Lock(), list[_Process]()

    async def run(self, agent: Agent, endpoint: EndpointOf, row: dict[str, Any], seconds: float) -> Ran:
        """Run an agent in the subprocess, as the function `run` does.

        A process that does not report an agent's outcome in time hangs, and is killed with all its agents.

        Args:
            agent: A function at the top of a file; see `named`.
            endpoint, row: The agent's arguments; the row must be picklable.
            seconds: Time limit of the agent.
        """
        try:
            with self._lock:
                if not self._held or self._held[0].ended:
                    self._held[:] = [_Process()]
                process = self._held[0]
                found = process.begin(named(agent), endpoint, row, seconds)
        except Exception as error:  # the row cannot be pickled
            return Ran(failure=f"{type(error).__name__}: {first_line(error)}")
        try:
            return await asyncio.wait_for(asyncio.wrap_future(found), seconds + _START_S)
        except TimeoutError:
            process.kill(hung=True)
            return Ran(
                failure=f"TimeoutError: no result within {seconds:g} s, and its process hung", late=True
            )

    def close(self) -> None:
        """End the process and the agents in it."""
        with self._lock:
            held, self._held = self._held, []
        for process in held:
            process.close()


def _serve(questions: BinaryIO, replies: BinaryIO) -> None:
    """Run agents until the stream of requests ends."""
    beside, telling = Beside(), threading.Lock()
    asked: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
    found = functools.cache(lambda name: load_object(name, "agent"))

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                asked.put(pickle.load(questions))
        asked.put(None)

    def tell(number: int, ran: Ran) -> None:
        with telling, contextlib.suppress(OSError):
            pickle.dump((number, ran), replies)
            replies.flush()

    async def one(number: int, name: str, *given: Any) -> None:
        try:
            tell(number, await run(beside, found(name), *given))
        except asyncio.CancelledError:
            tell(number, Ran(failure="it was abandoned because an agent blocked the shared event loop"))
            raise

    threading.Thread(target=listen, daemon=True).start()
    longest = 0.0
    while True:
        with contextlib.suppress(queue.Empty):
            if (question := asked.get(timeout=_LOOK_S)) is None:
                return
            number, text = question
            try:
                name, endpoint, row, seconds = pickle.loads(text)
                found(name)
            except Exception as error:
                tell(number, Ran(failure=f"{type(error).__name__}: {first_line(error)}"))
                continue
            longest = max(longest, seconds)
            beside.start(one(number, name, endpoint, row, seconds))
        beside.watch(longest + GRACE_S)


def main() -> None:
    """Run agents for the parent process, connected by standard input and output, and exit with it."""
    global _is_of_agents
    _is_of_agents = True
    del sys.argv[1:]
    # Agents and their programs may print and read, which must not touch the pipes of requests and replies.
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # it was opened on a pipe, and would buffer lines
    # The parent handles Ctrl-C, and this process exits with it; programs that agents start get it as usual.
    signal.signal(signal.SIGINT, lambda *_: None)
    _serve(questions, replies)
    os._exit(0)  # without waiting for agents that still run
