"""Asynchronous reward functions: all of a run wait at the same time, on one event loop in the main thread.

TRL runs them on a loop in a thread of its own, where nothing can interrupt one that blocks (a request without
a time limit, a loop that never awaits). Here the loop runs in the main thread. A coroutine that awaits is
cancelled at its limit; one that does not keeps the loop from turning, and then an alarm goes off that the
loop otherwise sets anew as long as it turns, and raises in the task that holds it up.

TRL calls reward functions one after the other, each for its list. The first asynchronous one that is called
for a batch therefore starts all of them; the others are done when they are called (:class:`Together`). Where
a function is called for each sample, its samples wait at the same time too.

Given up: where samples of a function wait for each other (for a lock that one of them holds and never
returns), all that wait run out of time with it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

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
)
from qerl.tasks.time_limit import TimeUp, alarm, can_interrupt, rearm

Result = TypeVar("Result")

_AT_ONCE = 16
"""Samples of one function that wait at the same time, where they are called one by one within its limit."""
_GRACE = 1.1  # a coroutine is cancelled at its limit; the alarm for one that never awaits comes later


class Together:
    """The asynchronous functions of a run, which are started together.

    A client that a function keeps between calls belongs to its event loop, so one loop has all calls.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._members: list[AtOnce] = []
        self._known_by: Sequence[Any] | None = None
        self._done: dict[AtOnce, Judged] = {}

    def add(self, member: "AtOnce") -> None:
        """Take a function among those that are started together."""
        self._members.append(member)

    def judge(self, member: "AtOnce", batch: Batch) -> Judged:
        """What a member gives for a batch; all of them are asked when the first is.

        A batch is known by its list of completions, which TRL hands to every function.
        """
        if self._known_by is not batch.known_by or member not in self._done:
            self._known_by = batch.known_by
            work = [each.judge_soon(batch) for each in self._members]
            judged = _run_watched(self._runner, work, lambda: max(each.stuck_s for each in self._members))
            self._done = dict(zip(self._members, judged, strict=True))
        judged_by_it = self._done.pop(member)
        if not self._done:
            self._known_by = None
        return judged_by_it


class AtOnce(Judging):
    """An asynchronous function, whose samples wait at the same time where it is called for samples.

    Attributes:
        stuck_s: Seconds after which a step of the event loop that this function holds up is interrupted.
    """

    def __init__(
        self, function: Callable[..., Any], timeout_s: float, alone: bool, outside: bool, together: Together
    ) -> None:
        super().__init__(function, timeout_s, alone, outside)
        self.stuck_s = _GRACE * timeout_s
        self._together = together
        together.add(self)

    def judge(self, batch: Batch) -> Judged:
        """See :meth:`Judging.judge`."""
        return self._together.judge(self, batch)

    async def judge_soon(self, batch: Batch) -> Judged:
        """As :meth:`judge`, on a loop that runs."""
        if self._alone:
            return await self._by_sample(batch)
        limit = self._batch_limit(batch)
        self.stuck_s = _GRACE * limit
        try:
            rewards = await self._call(limit, batch.columns)
            return Judged(checked(rewards, batch.samples), Outcome(batch.samples))
        except Exception as error:
            return await self._by_sample(batch.without_extra_logs(), error)

    async def _by_sample(self, batch: Batch, batch_error: Exception | None = None) -> Judged:
        self.stuck_s = _GRACE * self._timeout_s
        samples, extra = batch.samples, ExtraColumns(batch)
        rewards: list[float | None] = [self._failed] * samples
        errors: list[Exception] = []
        started = time.perf_counter()
        given = 0
        # A function that has limits of its own says itself how many of its calls go on at the same time.
        slots = asyncio.Semaphore(max(samples, 1) if self._outside else _AT_ONCE)

        async def one(i: int) -> None:
            nonlocal given
            async with slots:
                try:
                    (rewards[i],) = checked(await self._call(self._timeout_s, batch.sample(i, extra)), 1)
                    given += 1
                except Exception as error:
                    errors.append(error)
                    if given == 0 and len(errors) == HOPELESS and all(map(is_hopeless, errors)):
                        raise _Hopeless from error

        with contextlib.suppress(_Hopeless):
            await _all(one(i) for i in range(samples))
        self._measured(time.perf_counter() - started, given)
        extra.log()
        return Judged(rewards, Outcome(samples, samples - given, next(iter(errors), None)), batch_error)

    async def _call(self, seconds: float, arguments: dict[str, Any]) -> list[Any]:
        try:
            async with asyncio.timeout(None if self._outside else seconds):
                return listed(await self._function(**arguments))
        except TimeUp:
            raise TimeoutError(f"no result within {seconds:g} s, and nothing was awaited") from None
        except SystemExit as error:
            raise left(error) from error
        except KeyboardInterrupt as error:
            raise _ProcessEnds(error) from None
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no result within {seconds:g} s") from error


class _Hopeless(Exception):
    """The samples that are left need not be tried."""


class _ProcessEnds(BaseException):
    """What ends the process, in a form with which a loop first lets go of what else runs on it."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results of coroutines that run at the same time; if one raises, the others are cancelled first."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run_watched(
    runner: asyncio.Runner, work: Iterable[Coroutine[Any, Any, Judged]], stuck_s: Callable[[], float]
) -> list[Judged]:
    """Results of coroutines that run together; a step of the loop that takes longer than `stuck_s` fails."""
    spared: set[asyncio.Task | None] = {None}  # the loop itself, and tasks that are no function's

    async def beat() -> None:
        while True:
            rearm(stuck_s())
            await asyncio.sleep(min(stuck_s() / 10, 1.0))

    async def everything() -> list[Judged]:
        watch = asyncio.create_task(beat()) if can_interrupt() else None
        spared.update({asyncio.current_task(), watch})
        try:
            return await _all(work)
        finally:
            if watch is not None:
                watch.cancel()

    def on_alarm() -> None:
        if asyncio.current_task(runner.get_loop()) not in spared:
            raise TimeUp

    try:
        with alarm(stuck_s(), on_alarm):
            return runner.run(everything())
    except _ProcessEnds as error:
        raise error.cause from None
