"""Reward functions that ask something outside of this process, called while other samples are still decoded.

The call for a sample begins when its completion is finished; whoever then asks for the rewards of the whole
batch waits only for what is left. Each function has a thread with an event loop of its own. What it is called
with, what it gives and how it fails are what they are without this: such functions are called for each sample
anyway (:mod:`qerl.tasks.guard`), and what a call logs is handed on in the order of the samples.

Threads, because these functions wait (for a server, for programs that run in processes of their own), and a
thread that waits leaves Python to the one that decodes. They stay one object for a run: its connections, how
many of its calls go on at once, and its cache; they need not be pickled, and no process that holds the GPU is
forked.

Given up: functions that compute in this process. Their time limit is a signal, which reaches the main thread
alone, and that decodes; beside it they would also take turns with it at running Python. For the same reason a
function that never returns is not interrupted here.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from qerl.errors import QeRLError
from qerl.tasks.judging import (
    HOPELESS,
    Batch,
    ExtraColumns,
    Judged,
    Judging,
    Outcome,
    checked,
    is_hopeless,
    left,
    listed,
    mark,
    name_of,
)

_OF_A_SAMPLE = ("prompts", "completions", "completion_ids")
"""Arguments by which a sample whose call has begun is known again."""


def can_begin_early(function: Callable[..., Any]) -> bool:
    """Whether all that a function judges by lies outside of this process (`guard.judges_outside`)."""
    return bool(mark(function, "judges_outside")) and not mark(function, "computes_too")


class EarlyCalls:
    """The functions of a run whose calls begin early.

    Used from one thread, beside those in which the functions run.
    """

    def __init__(self) -> None:
        self._functions: list[Early] = []
        self._lock = threading.Lock()
        self._running, self._since, self._seconds = 0, 0.0, 0.0

    def add(self, function: "Early") -> None:
        """Take a function among those that are called."""
        self._functions.append(function)

    def begin(self, place: int, arguments: dict[str, Any]) -> None:
        """Begin the calls for a finished sample.

        Args:
            place: Of the sample in the batch for whose rewards somebody will ask.
            arguments: What the functions will be called with for the batch, for this sample alone.
        """
        for function in self._functions:
            function.begin(place, arguments)

    def abandon(self) -> None:
        """Give up calls for whose rewards nobody has asked."""
        for function in self._functions:
            function.abandon()

    def take_seconds(self) -> float:
        """Seconds in which a call was going on, since this was last asked."""
        with self._lock:
            now = time.perf_counter()
            seconds = self._seconds + (now - self._since if self._running else 0.0)
            self._seconds, self._since = 0.0, now
            return seconds

    def count(self, change: int) -> None:
        """Note that a call has begun (1) or ended (-1)."""
        with self._lock:
            now = time.perf_counter()
            if self._running:
                self._seconds += now - self._since
            self._running, self._since = self._running + change, now


@dataclass
class _Call:
    """A call for one sample, and what it logs until the batch is asked for."""

    arguments: dict[str, Any]
    metrics: list[tuple[str, float]] = field(default_factory=list)
    columns: list[tuple[str, Any]] = field(default_factory=list)
    reward: "Future[float | None]" = field(default_factory=Future)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, value))

    def log_extra(self, column: str, values: list[Any]) -> None:
        if len(values) != 1:
            raise ValueError(f"log_extra was given {len(values)} values of {column!r} for one completion")
        self.columns.append((column, values))

    def check(self, batch: Batch, i: int, name: str) -> None:
        """Refuse that a sample gets a reward that is another's."""
        for column in _OF_A_SAMPLE:
            if column in batch.columns and self.arguments[column] != [batch.columns[column][i]]:
                raise QeRLError(
                    f"The reward function {name!r} was called early with other {column} than sample {i} of "
                    "the batch has; what changes completions behind the rollout needs early_rewards: false."
                )


class _Tries:
    """How the calls for a batch go, as their loop sees it."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.given = 0
        self.tasks: set[asyncio.Task[Any]] = set()

    @property
    def hopeless(self) -> bool:
        first = self.errors[:HOPELESS]
        return len(first) == HOPELESS and not self.given and all(map(is_hopeless, first))


class Early(Judging):
    """A function that asks outside, plain or asynchronous; calls of a plain one follow each other.

    Args:
        function: With TRL's signature.
        timeout_s: Not applied: the function has time limits of its own.
        calls: Those of the run.
    """

    def __init__(self, function: Callable[..., Any], timeout_s: float, calls: EarlyCalls) -> None:
        super().__init__(function, timeout_s, alone=True, outside=True)
        self._name = name_of(function)
        self._calls, self._begun, self._tries = calls, dict[int, _Call](), _Tries()
        self._loop: asyncio.AbstractEventLoop | None = None
        calls.add(self)

    def begin(self, place: int, arguments: dict[str, Any]) -> None:
        """See :meth:`EarlyCalls.begin`."""
        self._begun[place] = call = _Call(arguments)
        kept = {"log_metric": call.log_metric, "log_extra": call.log_extra}
        given = {name: kept.get(name, value) for name, value in arguments.items()}
        work = self._one(given, self._tries)
        call.reward = asyncio.run_coroutine_threadsafe(work, self._running_loop())

    def abandon(self) -> None:
        """See :meth:`EarlyCalls.abandon`."""
        for call in self._begun.values():
            call.reward.cancel()
        self._begun, self._tries = {}, _Tries()

    def judge(self, batch: Batch) -> Judged:
        """See :meth:`Judging.judge`; calls for samples that nobody has begun begin now."""
        for i in range(batch.samples):
            if i not in self._begun:
                self.begin(i, batch.sample(i, ExtraColumns(batch)))
        calls = [self._begun[i] for i in range(batch.samples)]
        tries, outcome, extra = self._tries, Outcome(batch.samples), ExtraColumns(batch)
        rewards: list[float | None] = []
        try:
            for i, call in enumerate(calls):
                call.check(batch, i, self._name)
                rewards.append(self._reward(call, tries, outcome))
        finally:
            self.abandon()
        for i, call in enumerate(calls):
            for metric in call.metrics:
                batch.columns["log_metric"](*metric)
            for column in call.columns:
                extra.put(i, *column)
        extra.log()
        return Judged(rewards, outcome)

    def _reward(self, call: _Call, tries: _Tries, outcome: Outcome) -> float | None:
        try:
            return call.reward.result()
        except _ProcessEnds as error:
            raise error.cause from None
        except CancelledError as error:
            outcome.add(tries.errors[0] if tries.errors else error)
        except Exception as error:
            outcome.add(error)
        return None

    async def _one(self, arguments: dict[str, Any], tries: _Tries) -> float | None:
        """The reward of one sample; if all are hopeless, those that are left are given up."""
        if tries.hopeless:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None  # it runs on a loop
        tries.tasks.add(task)
        self._calls.count(1)
        try:
            (reward,) = checked(await self._given(arguments), 1)
        except Exception as error:
            tries.errors.append(error)
            if tries.hopeless:
                for other in tries.tasks - {task}:
                    other.cancel()
            raise
        except KeyboardInterrupt as error:
            raise _ProcessEnds(error) from None
        finally:
            self._calls.count(-1)
            tries.tasks.discard(task)
        tries.given += 1
        return reward

    async def _given(self, arguments: dict[str, Any]) -> list[Any]:
        try:
            rewards = self._function(**arguments)
            return listed(await rewards if inspect.isawaitable(rewards) else rewards)
        except SystemExit as error:
            raise left(error) from error

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """The function's loop; its thread ends with the process, whatever still runs in it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=f"reward-{self._name}", daemon=True).start()
        return self._loop


class _ProcessEnds(BaseException):
    """What ends the process, in a form that its event loop hands on."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause
