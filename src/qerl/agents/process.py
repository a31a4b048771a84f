"""Agents in a process of their own, beside the one that draws.

A client of OpenAI's API takes some milliseconds of the processor for a request, and in the process that draws
each of them is Python's lock taken from the thread that launches the engine's work. Here agents have an
interpreter of their own: all of them one, in which coroutines share an event loop and plain functions have
threads, as :mod:`qerl.calls.beside` calls them. What an agent is given goes there as a pickle, and what comes
back is a reward or the line of an error.

The process is started when an agent is first called, and runs the agent's file anew, as another module. It is
kept for all rollouts, so clients that the file makes are too. One that ends costs the trajectories that were
under way in it, and the next agent starts another. It ends with its questions, so with whoever asks.

This module is what runs there too, and imports neither torch nor transformers.
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
"""Seconds between two looks whether an agent holds up the event loop of all."""

_START_S, _END_S = 30.0, 2.0
"""Seconds that the process has for its start and for what an agent's file imports, and to end in."""

_BEGIN = "import sys; sys.path[:] = sys.argv[1:]; from qerl.agents import process; process.main()"
"""What the process runs, given its `sys.path`."""

_is_of_agents = False  # whether this process is one


@dataclass(frozen=True)
class EndpointOf:
    """What an agent is told of its trajectory.

    Attributes:
        base_url: Of the endpoint, with the version, as OpenAI's clients take it.
        api_key: Of this trajectory alone; it ends with it.
        model: The name of the policy.
    """

    base_url: str
    api_key: str
    model: str


Agent = Callable[[EndpointOf, dict[str, Any]], Any]
"""A function or coroutine function: given its endpoint and the columns of its row it returns the reward, or
None where the reward is sent to the endpoint (`POST /v1/reward`), now or later."""


@dataclass(frozen=True)
class Ran:
    """What has become of an agent.

    Attributes:
        reward: What it returned; None where it returned None or failed.
        failure: Type and first line of what it raised; empty where it returned.
        late: Whether its time was up.
    """

    reward: float | None = None
    failure: str = ""
    late: bool = False


async def run(beside: Beside, agent: Agent, endpoint: EndpointOf, row: dict[str, Any], seconds: float) -> Ran:
    """Run an agent, within `Beside.start`; what would end the process is the agent's failure.

    Args:
        beside: Calls it.
        agent, endpoint, row: The agent, and what it is given.
        seconds: Its time.
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
    """The agent as `load_object` finds it in another process: ``PATH.py:NAME``.

    Raises:
        QeRLError: It is no function at the top of a file.
    """
    if _is_of_agents:
        raise QeRLError(
            "The file of an agent begins a run of its own where it is imported, as by the process of agents; "
            'put what begins it under `if __name__ == "__main__":`.'
        )
    name, file = getattr(agent, "__qualname__", ""), None
    if inspect.isfunction(agent):
        file = inspect.getsourcefile(inspect.unwrap(agent))  # a decorator is another file's
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise QeRLError(
            f"The agent {name or agent!r} cannot run in a process of its own, which finds it by its file and "
            "name; pass a function that is defined at the top of a file, or set process: false."
        )
    return f"{Path(file).resolve()}:{name}"


class _Process:
    """A process in which agents run, and those that do."""

    def __init__(self) -> None:
        # As arguments, because programs that agents start, of another Python perhaps, have the environment.
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
        """Whether it runs no more agents."""
        return self._process.poll() is not None

    def begin(self, *asked: Any) -> "Future[Ran]":
        """What becomes of an agent, given the arguments of `_serve`."""
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
        """Hand on questions, in a thread: a process that hangs reads none, and no more fit into its pipe."""
        assert self._process.stdin is not None
        # It may have ended, which its listener says.
        with contextlib.suppress(OSError), self._process.stdin as questions:
            while (question := self._questions.get()) is not None:
                pickle.dump(question, questions)
                questions.flush()

    def _listen(self) -> None:
        """Take in what becomes of agents, until the process ends."""
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
        """End it, and what runs in it."""
        self._questions.put(None)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self, hung: bool = False) -> None:
        """End it at once; behind this call it has.

        Args:
            hung: Whether that is why, which those that are lost with it are told.
        """
        self._hung = hung
        self._process.kill()
        self._process.wait()


class AgentProcess:
    """Runs agents in a process of their own, which is started when it is needed; thread-safe."""

    def __init__(self) -> None:
        self._lock, self._held = threading.Lock(), list[_Process]()

    async def run(self, agent: Agent, endpoint: EndpointOf, row: dict[str, Any], seconds: float) -> Ran:
        """As `run`, there. A process that does not say in time what has become of an agent hangs, and is
        ended with all that runs in it.

        Args:
            agent: As `named` takes it.
            endpoint, row: What it is given; the row is pickled.
            seconds: Its time.
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
        """End the process, and what runs in it."""
        with self._lock:
            held, self._held = self._held, []
        for process in held:
            process.close()


def _serve(questions: BinaryIO, replies: BinaryIO) -> None:
    """Run agents until nobody asks any more."""
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
            tell(number, Ran(failure="it was left behind with an event loop that an agent held up"))
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
    """Run agents for the process at the other end of standard input and output, and end with it."""
    global _is_of_agents
    _is_of_agents = True
    del sys.argv[1:]
    # Agents and their programs may print, and read: what they say is no reply.
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # the pipe that it was made for would hold lines back
    # Ctrl-C is the parent's affair, with which this one ends; programs that agents start have it again.
    signal.signal(signal.SIGINT, lambda *_: None)
    _serve(questions, replies)
    os._exit(0)  # agents that still run are nobody's
