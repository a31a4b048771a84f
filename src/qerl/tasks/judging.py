"""One call of a reward function on a batch: what it gives, and what becomes of samples on which it fails.

The time limit that a user sets is for one sample, and a batch takes longer than a sample. The limit times
the number of samples would let one hanging sample hold a batch of a thousand for hours. So a batch gets the
limit itself plus 1 % of it per sample, which suffices for a function that takes up to a hundredth of its
limit per sample. Once a batch had to be called sample by sample, the time that a sample really takes is
known, and from then on a batch gets twice that per sample instead of the 1 %. If the first sixteen samples
all run out of time or reach no server, the others would too; they count as failed without being tried.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qerl.calls.alarm import call_within

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
    """What a reward function was marked with, or what the one that it wraps was; None where neither was.

    Args:
        function: A function, a `functools.partial` of one, or what `qerl.tasks.guard.guarded` made of one.
        name: Of the mark.
    """
    while True:
        found = getattr(function, name, None)
        if found is not None or not isinstance(function, partial):
            return found
        function = function.func


def name_of(function: RewardFunction) -> str:
    """The name of a reward function, or of what it is a partial of; of one without a name its type's."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class Batch:
    """What TRL calls a reward function with.

    Attributes:
        columns: Arguments by name: lists with one value per sample, prompts and completions among them, and
            what belongs to the call. Who calls an environment's reward by hand may give environments alone.
    """

    columns: dict[str, Any]

    @property
    def known_by(self) -> Sequence[Any]:
        """The list by which functions that are given the same batch know it: completions, if it has any."""
        lists = [value for name, value in self.columns.items() if name not in NOT_COLUMNS]
        return self.columns.get("completions", lists[0] if lists else ())

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.known_by)

    def sample(self, i: int) -> "SampleCall":
        """A call for one sample."""
        own = {key: value if key in NOT_COLUMNS else [value[i]] for key, value in self.columns.items()}
        return SampleCall(own)

    def without_extra_logs(self) -> "Batch":
        """The same for a second call, where the first one may have logged its extra columns already."""
        if "log_extra" not in self.columns:
            return self
        return Batch(self.columns | {"log_extra": lambda *_: None})


class SampleCall:
    """A call for one sample: what it is given, what it logs, and what comes of it.

    Args:
        arguments: What TRL would call the function with for this sample alone.

    Attributes:
        arguments: The same, with logs that are kept until the batch is judged.
        rewards: The one that it gives; none unless it has succeeded.
        error: What it failed with.
        metrics, columns: What it has logged: names and values.
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
    """How the calls for the samples of a batch go: errors in their order, and how many gave rewards in which
    time in all."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.given, self.seconds = 0, 0.0

    @property
    def hopeless(self) -> bool:
        """Whether those that are left need not be made."""
        first = self.errors[:HOPELESS]
        never = all(isinstance(error, TimeoutError | ConnectionError) for error in first)
        return len(first) == HOPELESS and not self.given and never


@dataclass
class Judged:
    """What came of a batch.

    Attributes:
        rewards: One per completion, None where there is none.
        failed: Completions on which the function failed.
        first: The first failure; None if there was none.
        batch_error: Why the call with the whole batch failed and was made for each sample, if it was.
    """

    rewards: list[float | None]
    failed: int = 0
    first: Exception | None = None
    batch_error: Exception | None = None


class Judging:
    """A reward function with its limits, called in this thread, for one sample after the other.

    Its methods are coroutines for those functions that are called elsewhere; here none of them waits.

    Args:
        function: With TRL's signature.
        timeout_s: Seconds for a sample.
        alone: Whether it judges each completion by itself, so that it is called for each sample at once.
        outside: Whether what it judges by lies outside of this process: it has time limits of its own, and a
            sample on which it fails has no reward, where otherwise it has 0.
    """

    at_once = 1
    """Calls for samples that go on at the same time."""

    def __init__(self, function: Callable[..., Any], timeout_s: float, alone: bool, outside: bool) -> None:
        self.function = function
        self._timeout_s = timeout_s
        self._alone = alone or outside
        self._outside = outside
        self._failed: float | None = None if outside else 0.0
        self._sample_s = _BATCH_SHARE * timeout_s

    def judge(self, batch: Batch) -> Judged:
        """Rewards for a batch; nothing that the function raises is raised, but for KeyboardInterrupt."""
        try:
            self.judge_soon(batch).send(None)
        except StopIteration as ended:
            return ended.value
        raise AssertionError("nothing waits here")

    async def judge_soon(self, batch: Batch) -> Judged:
        """As :meth:`judge`, awaited where the function is called."""
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
        """Calls for the samples of a batch."""
        calls, tries = [batch.sample(i) for i in range(batch.samples)], Tries()
        for call in calls:
            await self._try(call, tries)
        return calls, tries

    async def _try(self, call: SampleCall, tries: Tries) -> None:
        """Call for one sample, unless that is hopeless."""
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
        """What the function returns within a limit, which it has where it does not ask outside."""

        # A generator computes while it is read, so it is read within the limit too.
        def call() -> list[Any]:
            try:
                return listed(self.function(**arguments))
            except SystemExit as error:
                raise left(error) from error

        return call() if self._outside else call_within(seconds, call)


def _hand_on(batch: Batch, calls: Sequence[SampleCall]) -> None:
    """Log what calls for the samples of a batch have logged, in the order of the samples.

    TRL wants a value of an extra column for each sample: None where a call has not logged it.
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
    """What a reward function has failed with that would have ended the run without a word."""
    return RuntimeError(f"SystemExit ({error}), which would end the process")


def listed(rewards: Any) -> list[Any]:
    """The rewards as a list; text, mappings and sets are not taken for one."""
    if isinstance(rewards, str | bytes | Mapping | set):
        raise TypeError(f"the rewards are a {type(rewards).__name__}, not a list")
    return list(rewards)


def checked(rewards: list[Any], expected: int) -> list[float | None]:
    """The rewards as finite floats and Nones, as many as expected."""
    if len(rewards) != expected:
        raise ValueError(f"{len(rewards)} rewards for {expected} completions")
    for reward in rewards:
        if isinstance(reward, str | bytes):
            raise TypeError(f"a reward is the text {reward!r}, not a number")
    values = [None if reward is None else float(reward) for reward in rewards]
    if any(value is not None and not abs(value) <= _LARGEST for value in values):
        raise ValueError("a reward is not finite")
    return values
