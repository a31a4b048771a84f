"""Reward functions that wait for something: those of a run wait at the same time, outside this thread.

TRL calls reward functions one after the other, each for its list. So the first waiting function that is
called for a batch starts all of them, and the others have finished by the time they are called. If a function
is called per sample, its samples wait at the same time too.

**When a call begins.** A call begins as soon as its samples have ended, while others are still decoding. A
function that asks something outside of this process (`guard.judges_outside`) is called for each sample when
that sample ends (:meth:`Together.begin`). Other functions may compare the samples of a batch, and begin once
the batch is complete (:meth:`Together.start`): a group of an open call (`qerl.trainer.rollout_step`), or the
whole rollout. Several batches may wait at the same time. Arguments, rewards and failures are those of a call
after the rollout. Starting per group would not be enough for all functions: if a few answers have the
maximum length, most groups end with the rollout, and programs that keep all cores busy would begin after it.

Which rows decode together decides the last bits of their logits, so `Together.ended` waits briefly
(`PATIENCE`) for batches that are judged promptly: the rows decoded next do not depend on their timing.

Given up:

* Functions that compute in this process do not begin early. They would compete with the decoding for the
  GIL, and their time limit is an alarm, which only the main thread receives.
* If calls of a function wait for each other (for a lock that one of them never releases), all of them time
  out.
* A function that blocks the loop inside of C cancels the others' calls; they are called again without it.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent import futures
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from qerl.calls.alarm import TimeUp
from qerl.calls.beside import Beside, EndsProcess, is_async
from qerl.errors import QeRLError
from qerl.tasks.guard import (
    Batch,
    GuardedReward,
    Judged,
    Judging,
    RewardFunction,
    SampleCall,
    Tries,
    left,
    listed,
    mark,
)

Result = TypeVar("Result")

_AT_ONCE = 16
"""Maximum number of concurrent calls of a function that is called per sample within the time limit."""
PATIENCE = 1.0
"""Seconds that `Together.ended` waits for batches, until one has been late."""
_HELD = 1.1  # a coroutine is cancelled at its limit; a step of the loop is interrupted later

_OF_A_SAMPLE = ("prompts", "completions", "completion_ids")
"""Arguments that identify a sample whose calls have begun."""


def begins_early(function: Callable[..., Any]) -> bool:
    """Return True if a function judges entirely outside of this process (`guard.judges_outside`), so that it
    is called for each sample when that sample ends."""
    return bool(mark(function, "judges_outside")) and not mark(function, "computes_too")


@dataclass(frozen=True)
class Asked:
    """The calls for a sample, begun when the sample ended.

    Attributes:
        arguments: Arguments of the functions, for this sample alone.
        calls: The call of each function, with a future that is done when the call has ended.
    """

    arguments: dict[str, Any]
    calls: dict["Waiting", tuple[SampleCall, Future[None]]]


class Together:
    """The functions of a run that wait at the same time; used from one thread.

    Attributes:
        beside: Calls the functions on one event loop, to which clients that they keep are bound.
    """

    def __init__(self) -> None:
        self.beside = Beside()
        self._members: list[Waiting] = []
        self._known_by: Sequence[Any] | None = None
        self._done: dict[Waiting, Judged] = {}
        self._started: dict[int, tuple[Batch, Future[list[Judged]]]] = {}  # by the identity of `known_by`
        self._late = False
        self._lock = threading.RLock()
        self._running, self._since, self._seconds = 0, 0.0, 0.0

    def add(self, member: "Waiting") -> None:
        """Add a function to those that are started together."""
        self._members.append(member)

    @property
    def waits(self) -> bool:
        """True if there are any functions."""
        return bool(self._members)

    def begin(self, arguments: dict[str, Any]) -> Asked:
        """Begin the calls for a sample that has ended; `start` takes the result with the sample's batch.

        Args:
            arguments: Arguments of the functions, for this sample alone.
        """
        return Asked(arguments, {each: each.begin(arguments) for each in self._members if each.early})

    def start(self, columns: dict[str, Any], asked: Sequence[Asked | None] = ()) -> None:
        """Begin the calls for a batch; `judge`, given the same list of completions, waits for them.

        Args:
            columns: Arguments of the functions.
            asked: The result of `begin` per sample, or None; empty if there is none.

        Raises:
            QeRLError: A sample is not the one for which its calls were begun.
        """
        batch = Batch(columns, asked)
        _check_asked(batch)
        future = self.beside.start(_all(each.judge_soon(batch) for each in self._members))
        self._started[id(batch.known_by)] = batch, future

    def ended(self, known_by: Sequence[Sequence[Any]], wait: bool) -> list[int]:
        """Return the indices of the batches for which all functions have ended.

        Args:
            known_by: The list of completions of each batch; a batch that was not started counts as ended.
            wait: Block until at least one has ended.
        """
        started = [self._started[id(each)][1] for each in known_by if id(each) in self._started]
        if started and not self._late:
            _, late = futures.wait(started, PATIENCE)
            self._late = bool(late)
        while True:
            if self._members:
                self.beside.watch(max(each.held_s for each in self._members))
            found = [
                place
                for place, each in enumerate(known_by)
                if id(each) not in self._started or self._started[id(each)][1].done()
            ]
            if found or not wait:
                return found
            futures.wait(started, 0.1, futures.FIRST_COMPLETED)

    def abandon(self) -> None:
        """Cancel calls whose rewards have not been requested."""
        for _, future in self._started.values():
            future.cancel()
        self._started = {}
        for member in self._members:
            member.abandon()

    def judge(self, member: "Waiting", batch: Batch) -> Judged:
        """Return a member's result for a batch; the first request calls all members, unless `start` has.

        A batch is identified by its list of completions, which TRL passes to every function.
        """
        if self._known_by is not batch.known_by or member not in self._done:
            self._known_by = batch.known_by
            if id(batch.known_by) not in self._started:
                self.abandon()
                self.start(batch.columns)
            batch, future = self._started.pop(id(batch.known_by))
            self._done = self._judged(self._members, future) or self._ask_each(batch)
        judged = self._done.pop(member)
        if not self._done:
            self._known_by = None
        return judged

    def take_seconds(self) -> float:
        """Return the seconds in which at least one call was running, since the last use of this method."""
        with self._lock:
            self.count(0)
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def count(self, change: int) -> None:
        """Note that a call has begun (1) or ended (-1)."""
        with self._lock:
            now = time.perf_counter()
            if self._running:
                self._seconds += now - self._since
            self._running, self._since = self._running + change, now

    def _ask_each(self, batch: Batch) -> dict["Waiting", Judged]:
        """Call the members one after the other, so that a function that blocks the loop loses only its own
        calls."""
        done: dict[Waiting, Judged] = {}
        for each in self._members:
            for member in self._members:
                member.abandon()
            alone = {}
            if len(self._members) > 1:
                alone = self._judged([each], self.beside.start(_all([each.judge_soon(batch)])))
            done |= alone or {each: each.lost(batch)}
        return done

    def _judged(
        self, members: Sequence["Waiting"], future: "Future[list[Judged]]"
    ) -> dict["Waiting", Judged]:
        """Wait for the members' results; return {} if one of them blocked the loop until it was abandoned."""
        try:
            judged = self.beside.result(future, lambda: max(each.held_s for each in members))
            return dict(zip(members, judged, strict=True))
        except EndsProcess as error:
            raise error.cause from None
        except (CancelledError, TimeUp):  # TimeUp if it hit the code that waits for its call
            return {}
        finally:
            future.cancel()


class Waiting(Judging):
    """A function that is called outside this thread.

    Args:
        function, timeout_s, alone, outside: See :class:`Judging`; a plain function has to ask outside, and is
            called for one sample after the other.
        together: The functions of the run.

    Attributes:
        early: Whether it is called for each sample when that sample ends.
        held_s: Seconds after which a step of the event loop that this function blocks is interrupted.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout_s: float,
        alone: bool,
        outside: bool,
        together: Together,
    ) -> None:
        super().__init__(function, timeout_s, alone, outside)
        self._together, self.early, self.held_s = together, begins_early(function), _HELD * timeout_s
        self._begun: list[Future[None]] = []
        # A function with limits of its own limits its number of concurrent calls, too.
        self.at_once = 1 if not is_async(function) else 1_000_000 if outside else _AT_ONCE
        self.abandon()
        together.add(self)

    def judge(self, batch: Batch) -> Judged:
        return self._together.judge(self, batch)

    def lost(self, batch: Batch) -> Judged:
        """Return the result for a batch on which the function blocked the loop until it was abandoned."""
        error = TimeoutError(f"no result within {self._timeout_s:g} s, and nothing was awaited")
        return Judged([self._failed] * batch.samples, batch.samples, error)

    def begin(self, arguments: dict[str, Any]) -> tuple[SampleCall, "Future[None]"]:
        """See :meth:`Together.begin`."""
        call = SampleCall(arguments)
        self._begun.append(future := self._together.beside.start(self._try(call, self._tries)))
        return call, future

    def abandon(self) -> None:
        """Cancel the calls begun for single samples, and reset the statistics of calls."""
        for future in self._begun:
            future.cancel()
        self._begun, self._tries = [], Tries()
        self._slots = asyncio.Semaphore(self.at_once)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def _by_sample(self, batch: Batch) -> tuple[list[SampleCall], Tries]:
        tries = self._tries
        begun = [each and each.calls.get(self) for each in batch.asked or [None] * batch.samples]
        begun = [None if each is None or each[1].cancelled() else each for each in begun]
        calls = [batch.sample(i) if each is None else each[0] for i, each in enumerate(begun)]
        await _all(
            self._try(call, tries) if each is None else _ended(each[1])
            for call, each in zip(calls, begun, strict=True)
        )
        return calls, tries

    async def _try(self, call: SampleCall, tries: Tries) -> None:
        """See :class:`Judging`; once further calls are hopeless, running ones are cancelled."""
        task, tasks = asyncio.current_task(), self._tasks
        assert task is not None  # it runs on a loop
        async with self._slots:
            tasks.add(task)
            try:
                await super()._try(call, tries)
                if tries.hopeless:
                    for other in tasks - {task}:
                        other.cancel()
            except asyncio.CancelledError:
                if not tries.hopeless:
                    raise
            finally:
                tasks.discard(task)

    async def _call(self, seconds: float, arguments: dict[str, Any]) -> list[Any]:
        async def awaited() -> list[Any]:
            return listed(await self.function(**arguments))

        def plain() -> list[Any]:
            return listed(self.function(**arguments))

        self.held_s = _HELD * seconds
        work = awaited if is_async(self.function) else plain
        self._together.count(1)
        try:
            return await self._together.beside.call(work, None if self._outside else seconds)
        except EndsProcess as error:
            if isinstance(error.cause, SystemExit):
                raise left(error.cause) from error
            raise
        except TimeoutError as error:
            if str(error):
                raise
            raise TimeoutError(f"no result within {seconds:g} s") from error
        finally:
            self._together.count(-1)


def _check_asked(batch: Batch) -> None:
    """Raise if a sample would get the reward of another one."""
    for i, asked in enumerate(batch.asked):
        for column in _OF_A_SAMPLE if asked is not None else ():
            if column in batch.columns and asked.arguments[column] != [batch.columns[column][i]]:
                raise QeRLError(
                    f"The reward of sample {i} was requested with other {column} than it has now; the "
                    "engine must pass `ended` the completions that it returns, each with its index."
                )


async def _ended(future: "Future[None]") -> None:
    await asyncio.wrap_future(future)


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results of coroutines that run at the same time; if one raises, the others are cancelled first."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def guarded(
    function: RewardFunction,
    timeout_s: float = 10.0,
    together: Together | None = None,
) -> GuardedReward:
    """Wrap a reward function so that its failures are counted instead of raised.

    Args:
        function: With TRL's signature, plain or asynchronous; one that is guarded already is returned as it
            is, or guarded anew if it is to begin early among others. The wrapper has its name, by which TRL
            logs.
        timeout_s: Seconds per sample, above 0.
        together: The functions that wait at the same time as this one, if it is asynchronous or asks outside;
            None for none.

    Raises:
        QeRLError: ``timeout_s`` is not a positive number.
    """
    if isinstance(function, GuardedReward):
        if together is None or not begins_early(function):
            return function
        function = function.function
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise QeRLError(f"reward_timeout is {timeout_s!r}; it must be a number of seconds per sample.")
    if not 0 < timeout_s < math.inf:
        raise QeRLError(f"reward_timeout is {timeout_s}; it must be a number of seconds above 0.")
    together = together or Together()
    marks = bool(mark(function, "judges_alone")), bool(mark(function, "judges_outside"))
    if begins_early(function) or is_async(function):
        return GuardedReward(function, Waiting(function, timeout_s, *marks, together), waits=True)
    return GuardedReward(function, Judging(function, timeout_s, *marks), waits=False)
