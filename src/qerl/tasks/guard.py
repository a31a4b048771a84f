"""Guards around reward functions: samples on which a function raises or hangs are counted, not fatal.

A guarded function is called with the whole batch, as TRL calls it. Only if that call raises, runs out of time
or returns nonsense is the function called again for each sample, each time within the time limit
(:class:`Judging`, and :mod:`qerl.tasks.together` for coroutines). A sample that fails scores 0, the first
failure is logged, and every batch reports the share of failed samples through TRL's ``log_metric`` as
``rewards/<name>/failed``. The trainer, which sees the samples of all processes, decides if a function that
fails on all of them ends the run (:mod:`qerl.trainer.rewards`).

The rewards of a function that names a column (:func:`stratified`) are also logged per value of that column,
with failed samples as the zeros that they score.

Functions that judge each completion by itself (:func:`judges_alone`; the tasks' own do) are called sample by
sample from the start: a completion that is slow to judge then costs its own time limit and no second call.
Functions that ask something outside of this process (:func:`judges_outside`: a server, a sandbox) set their
own time limits, and a sample on which they fail has no reward, because the fault is not the sample's.

**Time limits.** The user's time limit is for one sample, and a batch takes longer than a sample. The limit
times the number of samples would let one hanging sample hold a batch of a thousand for hours. So a batch gets
the limit itself plus 1 % of it per sample, which suffices for a function that takes up to a hundredth of its
limit per sample. Once a batch had to be called sample by sample, the time of a sample is known, and from then
on a batch gets twice that per sample instead of the 1 %. If the first sixteen samples all run out of time or
reach no server, the others would too; they count as failed without being tried.

Given up: the second call repeats side effects, and a reward that compares the samples of a batch with each
other sees only one sample there. :mod:`qerl.calls` says what a time limit cannot interrupt.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from qerl.calls.alarm import call_within, can_interrupt

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, answer, **columns) -> rewards``, plain or ``async def``: a list with one number
per completion, None where the function does not apply."""

HOPELESS = 16
"""Samples in a row that run out of time or reach no server, after which the rest of a batch is not tried."""

NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric"})
"""Arguments that TRL passes to reward functions and that are not one value per sample."""

_BATCH_SHARE = 0.01  # of the limit, added per sample of a batch
_LARGEST = 3.4028234e38  # the largest FP32 number; TRL keeps rewards in FP32


def mark(function: RewardFunction, name: str) -> Any:
    """Return the mark of this name on a reward function, or on the function that it wraps; None without one.

    Args:
        function: A function, a `functools.partial` of one, or the result of `qerl.tasks.together.guarded`.
        name: Name of the mark.
    """
    while True:
        found = getattr(function, name, None)
        if found is not None or not isinstance(function, partial):
            return found
        function = function.func


def name_of(function: RewardFunction) -> str:
    """Name of a reward function; partials give the wrapped name, callables without one their class name."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class Batch:
    """The arguments of a reward function.

    Attributes:
        columns: Arguments by name: lists with one value per sample, such as prompts and completions, and
            the arguments in `NOT_COLUMNS`. A direct call of an environment's reward may have environments
            alone.
        asked: Per sample, the calls that began when it ended (`qerl.tasks.together.Asked`), or None; empty if
            no sample has any.
    """

    columns: dict[str, Any]
    asked: Sequence[Any] = ()

    @property
    def known_by(self) -> Sequence[Any]:
        """The list whose identity identifies the batch to all functions: completions, if it has any."""
        lists = [value for name, value in self.columns.items() if name not in NOT_COLUMNS]
        return self.columns.get("completions", lists[0] if lists else ())

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.known_by)

    def sample(self, i: int) -> "SampleCall":
        """Return the call for one sample."""
        own = {key: value if key in NOT_COLUMNS else [value[i]] for key, value in self.columns.items()}
        return SampleCall(own)

    def without_extra_logs(self) -> "Batch":
        """Return the batch with ``log_extra`` disabled, for a second call after one that may have logged."""
        if "log_extra" not in self.columns:
            return self
        return replace(self, columns=self.columns | {"log_extra": lambda *_: None})


class SampleCall:
    """A call for one sample: its arguments, logs and result.

    Args:
        arguments: TRL's arguments for this sample alone.

    Attributes:
        arguments: TRL's arguments, with log functions that keep their values until the batch is judged.
        rewards: The one reward; empty unless the call has succeeded.
        error: The failure, if any.
        metrics, columns: Logged names and values.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        logs = {"log_metric": self._log_metric, "log_extra": self._log_extra}
        self.arguments = {name: logs.get(name, value) for name, value in arguments.items()}
        self.rewards: list[float | None] = []
        self.error: Exception | None = None
        self.metrics: list[tuple[str, float]] = []
        self.columns: list[tuple[str, Any]] = []

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, value))

    def _log_extra(self, column: str, values: list[Any]) -> None:
        if len(values) != 1:
            raise ValueError(f"log_extra was given {len(values)} values of {column!r} for one completion")
        self.columns.append((column, values[0]))


class Tries:
    """Statistics of the calls for the samples of a batch: errors in their order, number and total time of
    successes."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.given, self.seconds = 0, 0.0

    @property
    def hopeless(self) -> bool:
        """True if the remaining calls need not be made."""
        first = self.errors[:HOPELESS]
        never = all(isinstance(error, TimeoutError | ConnectionError) for error in first)
        return len(first) == HOPELESS and not self.given and never


@dataclass
class Judged:
    """The rewards of a batch, one per completion, None where there is none.

    Attributes:
        failed: Number of completions on which the function failed.
        first: The first failure.
        batch_error: The failure of the call with the whole batch, if it was then made for each sample.
    """

    rewards: list[float | None]
    failed: int = 0
    first: Exception | None = None
    batch_error: Exception | None = None


class Judging:
    """A reward function with its limits, called in this thread, for one sample after the other.

    Its methods are coroutines because a subclass calls functions elsewhere and awaits them; here nothing is
    awaited.

    Args:
        function: A reward function with TRL's signature.
        timeout_s: Time limit per sample in seconds.
        alone: True if it judges each completion by itself, so that it is called per sample from the start.
        outside: True if it asks something outside of this process: it has time limits of its own, and a
            sample on which it fails has no reward, instead of 0.
    """

    at_once = 1
    """Maximum number of concurrent calls for samples."""

    def __init__(self, function: Callable[..., Any], timeout_s: float, alone: bool, outside: bool) -> None:
        self.function = function
        self._timeout_s = timeout_s
        self._alone = alone or outside
        self._outside = outside
        self._failed: float | None = None if outside else 0.0
        self._sample_s = _BATCH_SHARE * timeout_s

    def judge(self, batch: Batch) -> Judged:
        """Return the rewards of a batch; of the function's exceptions, only KeyboardInterrupt is raised."""
        try:
            self.judge_soon(batch).send(None)
        except StopIteration as ended:
            return ended.value
        raise AssertionError("nothing waits here")

    async def judge_soon(self, batch: Batch) -> Judged:
        """As :meth:`judge`, as a coroutine on the loop on which the function is called."""
        batch_error = None
        if not self._alone:
            try:
                limit = self._timeout_s + self._sample_s * batch.samples
                return Judged(checked(await self._call(limit, batch.columns), batch.samples))
            except Exception as error:
                batch_error, batch = error, batch.without_extra_logs()
        calls, tries = await self._by_sample(batch)
        if tries.given:
            self._sample_s = 2 * tries.seconds / tries.given / min(self.at_once, batch.samples)
        _hand_on(batch, calls)
        failed = [call.error or tries.errors[0] for call in calls if not call.rewards]
        rewards = [reward for call in calls for reward in call.rewards or [self._failed]]
        return Judged(rewards, len(failed), next(iter(failed), None), batch_error)

    async def _by_sample(self, batch: Batch) -> tuple[list[SampleCall], Tries]:
        """Make the calls for the samples of a batch."""
        calls, tries = [batch.sample(i) for i in range(batch.samples)], Tries()
        for call in calls:
            await self._try(call, tries)
        return calls, tries

    async def _try(self, call: SampleCall, tries: Tries) -> None:
        """Make the call for one sample, unless further calls are hopeless."""
        if tries.hopeless:
            return
        started = time.perf_counter()
        try:
            call.rewards = checked(await self._call(self._timeout_s, call.arguments), 1)
            tries.given += 1
            tries.seconds += time.perf_counter() - started
        except Exception as error:
            call.error = error
            tries.errors.append(error)

    async def _call(self, seconds: float, arguments: dict[str, Any]) -> list[Any]:
        """Call the function within a time limit, or without one if it asks outside."""

        # A generator computes while it is read, so it is read within the limit too.
        def call() -> list[Any]:
            try:
                return listed(self.function(**arguments))
            except SystemExit as error:
                raise left(error) from error

        return call() if self._outside else call_within(seconds, call)


def _hand_on(batch: Batch, calls: Sequence[SampleCall]) -> None:
    """Pass on the logged values of the calls for single samples, in the order of the samples.

    TRL expects one value per sample in an extra column: None if a call has not logged it.
    """
    columns: dict[str, list[Any]] = {}
    for i, call in enumerate(calls):
        for metric in call.metrics:
            batch.columns["log_metric"](*metric)
        for column, value in call.columns:
            columns.setdefault(column, [None] * len(calls))[i] = value
    for column, values in columns.items():
        batch.columns["log_extra"](column, values)


def left(error: SystemExit) -> Exception:
    """Return the failure to count for a SystemExit, which would end the run without a message."""
    return RuntimeError(f"SystemExit ({error}), which would end the process")


def listed(rewards: Any) -> list[Any]:
    """Return the rewards as a list; raise TypeError for text, mappings and sets."""
    if isinstance(rewards, str | bytes | Mapping | set):
        raise TypeError(f"the rewards are a {type(rewards).__name__}, not a list")
    return list(rewards)


def checked(rewards: list[Any], expected: int) -> list[float | None]:
    """Return the rewards as floats and None; raise unless all are finite and their number is as expected."""
    if len(rewards) != expected:
        raise ValueError(f"{len(rewards)} rewards for {expected} completions")
    for reward in rewards:
        if isinstance(reward, str | bytes):
            raise TypeError(f"a reward is the text {reward!r}, not a number")
    values = [None if reward is None else float(reward) for reward in rewards]
    if any(value is not None and not abs(value) <= _LARGEST for value in values):
        raise ValueError("a reward is not finite")
    return values


logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable)


def judges_alone(function: Function) -> Function:
    """Mark a function whose reward for a completion does not depend on the rest of the batch; return it."""
    function.__dict__["judges_alone"] = True
    return function


def judges_outside(function: Function) -> Function:
    """Mark a function that asks something outside of this process about each completion; return it.

    The function limits its own time and its number of concurrent calls; a sample on which it fails has no
    reward. It is called outside the main thread, as soon as a sample has ended; a plain function is called
    for one sample after the other, each time in a new thread.
    """
    function.__dict__["judges_outside"] = True
    return judges_alone(function)


def stratified(function: RewardFunction, column: str) -> RewardFunction:
    """Mark a function whose rewards are also logged per value of a column of the rows; return it."""
    function.__dict__["strata"] = column
    return function


def stratum(column: str, value: Any) -> str:
    """The name of a stratum, such as ``steps_2``."""
    return f"{column}_{value}"


class GuardedReward:
    """A reward function whose failures are counted; :func:`qerl.tasks.together.guarded` makes it.

    Args:
        function: The guarded function.
        judging: Calls it.
        waits: True if the function is called outside this thread.

    Attributes:
        last: The result of the last call.
        judges_alone, judges_outside, computes_too: The function's marks.
    """

    def __init__(self, function: RewardFunction, judging: Judging, waits: bool) -> None:
        self.function, self._judging, self._waits = function, judging, waits
        self.judges_alone = bool(mark(function, "judges_alone"))
        self.judges_outside = bool(mark(function, "judges_outside"))
        self.computes_too = bool(mark(function, "computes_too"))
        self._strata: str | None = mark(function, "strata")
        self._said: set[str] = set()
        self.last = Judged([])
        self.__name__ = name_of(function)

    def __call__(
        self, /, prompts: list | None = None, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        """Return one reward per sample; the arguments are TRL's, and those that the function does not read
        may be missing."""
        given = {"prompts": prompts, "completions": completions}
        batch = Batch({name: values for name, values in given.items() if values is not None} | columns)
        if not self._waits and not self.judges_outside and not can_interrupt():
            self._say(
                "no limit",
                "Reward function %r runs without a time limit, because this is not the main thread.",
            )
        self.last = judged = self._judging.judge(batch)
        if self.last.failed:
            score = "have no reward" if self.judges_outside else "score 0"
            text = (
                f"Reward function %r failed on %d of %d samples, which {score} (first failure: %s). Later "
                "failures are counted in rewards/%s/failed."
            )
            first = describe(self.last.first)
            self._say("failed", text, self.last.failed, batch.samples, first, self.__name__)
        elif judged.batch_error is not None:
            text = "Reward function %r failed on a batch of %d (%s) and was called sample by sample."
            self._say("batch", text, batch.samples, describe(judged.batch_error))
        if "log_metric" in columns:
            self._log(judged.rewards, columns, columns["log_metric"])
        return judged.rewards

    def _log(
        self, rewards: list[float | None], columns: dict[str, Any], log: Callable[[str, float], None]
    ) -> None:
        log(f"rewards/{self.__name__}/failed", self.last.failed / max(len(rewards), 1))
        if self._strata is not None:
            # One call per sample: the trainer averages the logged values over all processes.
            for value, reward in zip(columns.get(self._strata, ()), rewards, strict=False):
                if reward is not None:
                    log(f"rewards/{self.__name__}/{stratum(self._strata, value)}", reward)

    def _say(self, what: str, text: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(text, self.__name__, *values)


def describe(error: BaseException | None) -> str:
    """The type and the message of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
