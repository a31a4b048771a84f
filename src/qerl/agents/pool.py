"""Tool calls that run while the engine decodes, each with a time limit, so that none can block a run.

The calls of a turn run one after the other, because they act on the same environment. Calls of different
trajectories run concurrently (:mod:`qerl.calls.beside`), so a tool that several trajectories share must be
thread-safe. A call that times out yields an error at once; while it may still be running, the later calls of
its turn are not made and yield the same error.

Which rows decode together decides the last bits of their logits, so a repeated or resumed run has to answer
the same turns at the same time. For tools that answer promptly this is guaranteed: `collect` waits briefly
for the turns that have just ended, and returns answers in the order of `submit`. A tool that was late once is
not waited for again.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from qerl.agents.text import whole
from qerl.calls.beside import GRACE_S, Beside, EndsProcess, StillRunsError, is_async
from qerl.errors import QeRLError

PATIENCE = 1.0
"""Seconds that `ToolPool.collect` waits for turns that have just ended, unless their tools were late once."""


@dataclass(frozen=True)
class Call:
    """A tool call to make.

    Attributes:
        name: The name by which the model called it.
        function: None where there is no such tool.
        arguments: By name.
        error: Why there is no function to call; empty if there is one.
    """

    name: str
    function: Callable[..., Any] | None
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Answer:
    """The result of a call.

    Attributes:
        text: The returned value as text, cut to the limit, or the error; None where it returned None.
        failed: True if the call could not be made, raised or timed out.
        hangs: True if the call may still be running.
    """

    name: str
    text: str | None
    failed: bool = False
    hangs: bool = False


@dataclass(eq=False)
class _Turn:
    """The calls of one turn, their answers so far, and a future that is done when the turn is."""

    key: int
    calls: Sequence[Call]
    answers: list[Answer] = field(default_factory=list)
    ended: "Future[None]" = field(default_factory=Future)

    @property
    def unanswered(self) -> Sequence[Call]:
        return self.calls[len(self.answers) :]


class ToolPool:
    """Runs tool calls; used from one thread.

    Args:
        timeout: Time limit of a call in seconds.
        output_limit: Maximum number of characters of an answer; the rest is cut.
        beside: Makes the calls; None creates one.
        patience: See `PATIENCE`.
    """

    def __init__(
        self, timeout: float, output_limit: int, beside: Beside | None = None, patience: float = PATIENCE
    ) -> None:
        if not 0 < timeout < float("inf"):
            raise QeRLError(f"tool_timeout is {timeout}; it must be a number of seconds above 0.")
        if output_limit < 1:
            raise QeRLError(f"tool_output_limit is {output_limit}; it must be a count of characters above 0.")
        self._timeout, self._limit = timeout, output_limit
        self._patience = min(patience, timeout + GRACE_S)
        self._beside = beside or Beside()
        self._turns: list[_Turn] = []
        self._fresh: list[_Turn] = []  # submitted since the last `collect`
        self._late: set[str] = set()  # names of tools that were late once

    @property
    def beside(self) -> Beside:
        """The `Beside` that makes the calls."""
        return self._beside

    @property
    def pending(self) -> int:
        """Number of turns that have not been answered."""
        return len(self._turns)

    def submit(self, key: int, calls: Sequence[Call]) -> None:
        """Start the calls of a turn; `collect` returns the answers under the same key."""
        turn = _Turn(key, calls)
        turn.ended = self._beside.start(self._make(turn))
        self._turns.append(turn)
        self._fresh.append(turn)

    def collect(self, wait: bool) -> list[tuple[int, list[Answer]]]:
        """Return the answers of turns that have ended or timed out since the last call, in `submit` order.

        Args:
            wait: Block until at least one turn is answered, if any is pending.
        """
        self._wait_for_prompt_ones()
        while True:
            self._beside.watch(self._timeout + GRACE_S)
            ended = [turn for turn in self._turns if turn.ended.done()]
            if ended or not (wait and self._turns):
                break
            futures.wait([turn.ended for turn in self._turns], 0.1, futures.FIRST_COMPLETED)
        self._turns = [turn for turn in self._turns if turn not in ended]
        return [(turn.key, [*turn.answers, *map(self._out_of_time, turn.unanswered)]) for turn in ended]

    def abandon(self) -> None:
        """Cancel all pending calls."""
        for turn in self._turns:
            turn.ended.cancel()
        self._turns, self._fresh = [], []

    def close(self) -> None:
        """Cancel all calls and end the event loop."""
        self.abandon()
        self._beside.close()

    def _wait_for_prompt_ones(self) -> None:
        """Wait briefly for the turns submitted since the last `collect`, and note which tools are late."""
        prompt = [turn for turn in self._fresh if not self._late & {call.name for call in turn.calls}]
        futures.wait([turn.ended for turn in prompt], self._patience)
        for turn in prompt:
            if not turn.ended.done():
                self._late |= {call.name for call in turn.unanswered}
        self._fresh = []

    async def _make(self, turn: _Turn) -> None:
        """Make the calls of a turn in order, up to one that times out and may still be running."""
        async with self._beside.slots:
            for call in turn.calls:
                answer = await self._answer(call)
                turn.answers.append(answer)
                if answer.hangs:
                    return

    async def _answer(self, call: Call) -> Answer:
        """Make a call and convert its result to text; an exception in either becomes the answer."""
        function = call.function
        if function is None:
            return Answer(call.name, self._cut(_error(call.error)), failed=True)

        async def awaited() -> str | None:
            return self._cut(await function(**call.arguments))

        def plain() -> str | None:
            return self._cut(function(**call.arguments))

        try:
            text = await self._beside.call(awaited if is_async(function) else plain, self._timeout)
            return Answer(call.name, text)
        except StillRunsError:
            return self._out_of_time(call)
        except asyncio.CancelledError:  # the turn is given up
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt fail the call alone
            return self._failed(call, error.cause if isinstance(error, EndsProcess) else error)

    def _failed(self, call: Call, error: BaseException) -> Answer:
        """Turn an exception into an answer; its message may be empty, or `str` may raise on it."""
        text = ""
        with contextlib.suppress(Exception):
            text = str(error)
        if not text and isinstance(error, TimeoutError):
            text = f"no result within {self._timeout:g} s"
        return Answer(call.name, self._cut(_error(text or type(error).__name__)), failed=True)

    def _out_of_time(self, call: Call) -> Answer:
        return Answer(call.name, _error(f"no result within {self._timeout:g} s"), failed=True, hangs=True)

    def _cut(self, result: Any) -> str | None:
        if result is None:
            return None
        text = whole(str(result))
        left_out = len(text) - self._limit
        return text if left_out <= 0 else f"{text[: self._limit]} [{left_out} more characters]"


def _error(text: str) -> str:
    """The error text that the model reads."""
    return str({"error": text})
