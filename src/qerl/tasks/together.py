"""Reward functions that wait for something: all of a run wait at the same time, beside this thread.

TRL calls reward functions one after the other, each for its list. The first of these that is called for a
batch therefore starts all of them; the others are done when they are called. Where a function is called for
each sample, its samples wait at the same time too.

Functions that ask something outside of this process may also be called for each sample as soon as it is
finished, while others are still decoded (:meth:`Together.begin`); the call for the whole batch then waits
only for what is left. Their arguments, rewards and failures are the same.

A batch may also be asked about without waiting for it (:meth:`Together.start`), while others are still
decoded: that is how groups of an open call are judged (`qerl.trainer.rollout_step`). Several such batches
wait at the same time. Which rows decode together decides the last bits of their logits, so for functions that
answer at once a moment is waited (`PATIENCE`): then what is decoded beside them does not depend on their
time.

Given up:

* Functions that compute in this process do not begin early. They would take turns with the decoding at
  running Python, and their time limit is an alarm, which reaches the main thread alone.
* Where samples of a function wait for each other (for a lock that one of them holds and never returns), all
  that wait run out of time with it.
* A function that holds up the loop inside of C loses the others' calls; they are called again without it.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent import futures
from concurrent.futures import CancelledError, Future
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
    name_of,
)

Result = TypeVar("Result")

_AT_ONCE = 16
"""Samples of one function that wait at the same time, where they are called one by one within its limit."""
PATIENCE = 1.0
"""Seconds that `Together.ended` waits for batches, until one has been late."""
_HELD = 1.1  # a coroutine is cancelled at its limit; a step of the loop is interrupted later

_OF_A_SAMPLE = ("prompts", "completions", "completion_ids")
"""Arguments by which a sample whose call has begun is known again."""


def can_begin_early(function: Callable[..., Any]) -> bool:
    """True if everything that a function judges by lies outside of this process (`guard.judges_outside`)."""
    return bool(mark(function, "judges_outside")) and not mark(function, "computes_too")


class Together:
    """The functions of a run that wait at the same time; used from one thread.

    Args:
        early: True if those that can begin early do.

    Attributes:
        beside: Calls them, on one event loop, to which a client that they keep belongs.
    """

    def __init__(self, early: bool = False) -> None:
        self.early, self.beside = early, Beside()
        self._members: list[Waiting] = []
        self._known_by: Sequence[Any] | None = None
        self._done: dict[Waiting, Judged] = {}
        self._started: dict[int, tuple[Batch, Future[list[Judged]]]] = {}  # by the identity of `known_by`
        self._late = False
        self._lock = threading.RLock()
        self._running, self._since, self._seconds = 0, 0.0, 0.0

    def add(self, member: "Waiting") -> None:
        """Take a function among those that are started together."""
        self._members.append(member)

    def begin(self, place: int, arguments: dict[str, Any]) -> None:
        """Begin the calls for a finished sample of the functions that begin early.

        Args:
            place: Of the sample in its batch.
            arguments: Of the functions for the batch, for this sample alone.
        """
        for member in self._members:
            if member.early:
                member.begin(place, arguments)

    def start(self, columns: dict[str, Any], place: int) -> None:
        """Begin the calls for a batch; `judge`, given the same list of completions, waits for them.

        Args:
            columns: Arguments of the functions.
            place: Of the batch's first sample among those that `begin` was told of.
        """
        if self._members:
            batch = Batch(columns, place)
            for each in self._members:
                each.check_begun(batch)
            future = self.beside.start(_all(each.judge_soon(batch) for each in self._members))
            self._started[id(batch.known_by)] = batch, future

    def ended(self, known_by: Sequence[Sequence[Any]], wait: bool) -> list[int]:
        """Places, among batches of these lists of completions, of those for which all functions have ended.

        Args:
            known_by: Of batches that were started; where no function waits, all have ended.
            wait: Return only when there is one.
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
        """Give up calls whose rewards have not been asked for."""
        for _, future in self._started.values():
            future.cancel()
        self._started = {}
        self._forget()

    def _forget(self) -> None:
        for member in self._members:
            member.abandon()

    def judge(self, member: "Waiting", batch: Batch) -> Judged:
        """A member's result for a batch; all members are called when the first is asked.

        A batch is known by its list of completions, which TRL hands to every function.
        """
        if self._known_by is not batch.known_by or member not in self._done:
            self._known_by = batch.known_by
            if id(batch.known_by) in self._started:
                begun, future = self._started.pop(id(batch.known_by))
                self._done = self._judged(self._members, future) or self._ask_each(begun)
            else:
                try:
                    for each in self._members:
                        each.check_begun(batch)
                    self._done = self._ask(self._members, batch) or self._ask_each(batch)
                finally:
                    self.abandon()
        judged = self._done.pop(member)
        if not self._done:
            self._known_by = None
        return judged

    def take_seconds(self) -> float:
        """Seconds in which a call for a sample was going on, since the last time this was asked."""
        with self._lock:
            self.count(0)
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def count(self, change: int) -> None:
        """Note that a call for a sample has begun (1) or ended (-1)."""
        with self._lock:
            now = time.perf_counter()
            if self._running:
                self._seconds += now - self._since
            self._running, self._since = self._running + change, now

    def _ask_each(self, batch: Batch) -> dict["Waiting", Judged]:
        """As :meth:`_ask`, one after the other, so that a function that holds up the loop loses its own
        calls alone."""
        done: dict[Waiting, Judged] = {}
        for each in self._members:
            self._forget()
            alone = self._ask([each], batch) if len(self._members) > 1 else {}
            done |= alone or {each: each.lost(batch)}
        return done

    def _ask(self, members: Sequence["Waiting"], batch: Batch) -> dict["Waiting", Judged]:
        """The members' results; nothing if one of them has held up the loop until it was left behind."""
        return self._judged(members, self.beside.start(_all(each.judge_soon(batch) for each in members)))

    def _judged(
        self, members: Sequence["Waiting"], future: "Future[list[Judged]]"
    ) -> dict["Waiting", Judged]:
        try:
            judged = self.beside.result(future, lambda: max(each.held_s for each in members))
            return dict(zip(members, judged, strict=True))
        except EndsProcess as error:
            raise error.cause from None
        except (CancelledError, TimeUp):  # the latter where it hit what waits for the call that was meant
            return {}
        finally:
            future.cancel()


class Waiting(Judging):
    """A function that is called beside this thread.

    Args:
        function, timeout_s, alone, outside: As in :class:`Judging`; plain functions only if they ask outside,
            and their calls follow each other.
        together: The functions of the run.
        early: True if its calls begin as samples are finished.

    Attributes:
        held_s: Seconds after which a step of the event loop that this function holds up is interrupted.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout_s: float,
        alone: bool,
        outside: bool,
        together: Together,
        early: bool,
    ) -> None:
        super().__init__(function, timeout_s, alone, outside)
        self._together, self.early, self.held_s = together, early, _HELD * timeout_s
        self._begun: dict[int, tuple[SampleCall, Future[None]]] = {}
        # A function that has limits of its own says itself how many of its calls go on at the same time.
        self.at_once = 1 if not is_async(function) else 1_000_000 if outside else _AT_ONCE
        self.abandon()
        together.add(self)

    def judge(self, batch: Batch) -> Judged:
        return self._together.judge(self, batch)

    def lost(self, batch: Batch) -> Judged:
        """The result for a batch on which the function has held up the loop until it was left behind."""
        error = TimeoutError(f"no result within {self._timeout_s:g} s, and nothing was awaited")
        return Judged([self._failed] * batch.samples, batch.samples, error)

    def begin(self, place: int, arguments: dict[str, Any]) -> None:
        """See :meth:`Together.begin`."""
        call = SampleCall(arguments)
        self._begun[place] = call, self._together.beside.start(self._try(call, self._tries))

    def abandon(self) -> None:
        """Give up calls that have begun, and forget the results of others."""
        for _, future in self._begun.values():
            future.cancel()
        self._begun, self._tries = {}, Tries()
        self._slots = asyncio.Semaphore(self.at_once)
        self._tasks: set[asyncio.Task[Any]] = set()

    def check_begun(self, batch: Batch) -> None:
        """Refuse to give a sample the reward of another one.

        Raises:
            QeRLError: A sample has other arguments than its call has begun with.
        """
        for i in range(batch.samples):
            if batch.place + i not in self._begun:
                continue
            call, _ = self._begun[batch.place + i]
            for column in _OF_A_SAMPLE:
                if column in batch.columns and call.arguments[column] != [batch.columns[column][i]]:
                    raise QeRLError(
                        f"The reward function {name_of(self.function)!r} was called early with other "
                        f"{column} than sample {i} of the batch has; what changes completions behind the "
                        "rollout needs early_rewards: false."
                    )

    async def _by_sample(self, batch: Batch) -> tuple[list[SampleCall], Tries]:
        tries = self._tries
        begun = [self._begun.get(batch.place + i) for i in range(batch.samples)]
        calls = [batch.sample(i) if each is None else each[0] for i, each in enumerate(begun)]
        await _all(
            self._try(call, tries) if each is None else _ended(each[1])
            for call, each in zip(calls, begun, strict=True)
        )
        return calls, tries

    async def _try(self, call: SampleCall, tries: Tries) -> None:
        """As for :class:`Judging`; once it is hopeless, calls that go on are given up."""
        task, tasks = asyncio.current_task(), self._tasks
        assert task is not None  # it runs on a loop
        async with self._slots:
            tasks.add(task)
            self._together.count(1)
            try:
                await super()._try(call, tries)
                if tries.hopeless:
                    for other in tasks - {task}:
                        other.cancel()
            except asyncio.CancelledError:
                if not tries.hopeless:
                    raise
            finally:
                self._together.count(-1)
                tasks.discard(task)

    async def _call(self, seconds: float, arguments: dict[str, Any]) -> list[Any]:
        async def awaited() -> list[Any]:
            return listed(await self.function(**arguments))

        def plain() -> list[Any]:
            return listed(self.function(**arguments))

        self.held_s = _HELD * seconds
        work = awaited if is_async(self.function) else plain
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
    """The reward function, whose failures are counted instead of raised.

    Args:
        function: With TRL's signature, plain or asynchronous; one that is guarded already is returned as it
            is, or guarded anew if its calls are to begin early. The wrapper has its name, by which TRL logs.
        timeout_s: Seconds per sample, above 0.
        together: The functions that wait at the same time as this one, if it is asynchronous or begins early;
            None for none.

    Raises:
        QeRLError: ``timeout_s`` is not a positive number.
    """
    if isinstance(function, GuardedReward):
        if together is None or not together.early or not can_begin_early(function):
            return function
        function = function.function
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise QeRLError(f"reward_timeout is {timeout_s!r}; it must be a number of seconds per sample.")
    if not 0 < timeout_s < math.inf:
        raise QeRLError(f"reward_timeout is {timeout_s}; it must be a number of seconds above 0.")
    together = together or Together()
    marks = bool(mark(function, "judges_alone")), bool(mark(function, "judges_outside"))
    early = together.early and can_begin_early(function)
    if early or is_async(function):
        return GuardedReward(function, Waiting(function, timeout_s, *marks, together, early), waits=True)
    return GuardedReward(function, Judging(function, timeout_s, *marks), waits=False)
