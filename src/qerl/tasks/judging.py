"""One call of a reward function on a batch: what it gives, and what becomes of samples on which it fails.

The time limit that a user sets is for one sample, and a batch takes longer than a sample. The limit times
the number of samples would let one hanging sample hold a batch of a thousand for hours. So a batch gets the
limit itself plus 1 % of it per sample, which suffices for a function that takes up to a hundredth of its
limit per sample. Once a batch had to be called sample by sample, the time that a sample really takes is
known, and from then on a batch gets twice that per sample instead of the 1 %. If the first sixteen samples
all run out of time or reach no server, the others would too; they count as failed without being tried.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from qerl.tasks.time_limit import call_within

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


@dataclass
class Outcome:
    """How one call of a guarded function went.

    Attributes:
        samples: Number of completions that the function was to judge.
        failed: Number of completions on which the function failed.
        first: The first failure; None if there was none.
    """

    samples: int = 0
    failed: int = 0
    first: Exception | None = None

    def add(self, error: Exception, samples: int = 1) -> None:
        """Count samples on which the function failed with this error."""
        self.failed += samples
        self.first = self.first or error


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

    def sample(self, i: int, extra: "ExtraColumns") -> dict[str, Any]:
        """Keyword arguments for one sample, whose extra columns are put together with the others'."""
        own = {key: value if key in NOT_COLUMNS else [value[i]] for key, value in self.columns.items()}
        if "log_extra" in own:
            own["log_extra"] = partial(extra.put, i)
        return own

    def without_extra_logs(self) -> "Batch":
        """The same for a second call, where the first one may have logged its extra columns already."""
        if "log_extra" not in self.columns:
            return self
        return Batch(self.columns | {"log_extra": lambda *_: None})


class ExtraColumns:
    """Extra columns of TRL's table of completions, put together from calls for one sample each.

    TRL wants a value for each sample, in their order; calls may fail, skip a column, or end in another order.

    Args:
        batch: Whose samples they are.
    """

    def __init__(self, batch: Batch) -> None:
        self._samples, self._log = batch.samples, batch.columns.get("log_extra")
        self._values: dict[str, list[Any]] = {}

    def put(self, i: int, column: str, values: list[Any]) -> None:
        """Take what the call for a sample logs."""
        if len(values) != 1:
            raise ValueError(f"log_extra was given {len(values)} values of {column!r} for one completion")
        self._values.setdefault(column, [None] * self._samples)[i] = values[0]

    def log(self) -> None:
        """Hand the columns to TRL, None where a sample has no value."""
        for column, values in self._values.items():
            assert self._log is not None  # somebody has called `put`
            self._log(column, values)


@dataclass(frozen=True)
class Judged:
    """What came of a batch.

    Attributes:
        rewards: One per completion, None where there is none.
        outcome: How many samples the function failed on.
        batch_error: Why the call with the whole batch failed and was made for each sample, if it was.
    """

    rewards: list[float | None]
    outcome: Outcome
    batch_error: Exception | None = None


class Judging(ABC):
    """A reward function with its limits.

    Args:
        function: With TRL's signature.
        timeout_s: Seconds for a sample.
        alone: Whether it judges each completion by itself, so that it is called for each sample at once.
        outside: Whether what it judges by lies outside of this process: it has time limits of its own, and a
            sample on which it fails has no reward, where otherwise it has 0.
    """

    def __init__(self, function: Callable[..., Any], timeout_s: float, alone: bool, outside: bool) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._alone = alone or outside
        self._outside = outside
        self._failed: float | None = None if outside else 0.0
        self._sample_s = _BATCH_SHARE * timeout_s

    @abstractmethod
    def judge(self, batch: Batch) -> Judged:
        """Rewards for a batch; nothing that the function raises is raised, but for KeyboardInterrupt."""

    def _batch_limit(self, batch: Batch) -> float:
        return self._timeout_s + self._sample_s * batch.samples

    def _measured(self, seconds: float, samples: int) -> None:
        """Take note of how long so many samples took in all that were called by themselves."""
        if samples:
            self._sample_s = 2 * seconds / samples


class InTurn(Judging):
    """A plain function, called for one sample after the other where it is called for samples."""

    def judge(self, batch: Batch) -> Judged:
        """See :meth:`Judging.judge`."""
        if self._alone:
            return self._by_sample(batch)
        try:
            rewards = self._call(self._batch_limit(batch), batch.columns)
            return Judged(checked(rewards, batch.samples), Outcome(batch.samples))
        except Exception as error:
            return self._by_sample(batch.without_extra_logs(), error)

    def _by_sample(self, batch: Batch, batch_error: Exception | None = None) -> Judged:
        outcome, extra = Outcome(batch.samples), ExtraColumns(batch)
        rewards: list[float | None] = []
        seconds: list[float] = []
        hopeless = 0
        for i in range(outcome.samples):
            started = time.perf_counter()
            try:
                rewards += checked(self._call(self._timeout_s, batch.sample(i, extra)), 1)
                seconds.append(time.perf_counter() - started)
            except Exception as error:
                rewards.append(self._failed)
                outcome.add(error)
                hopeless += is_hopeless(error)
                if hopeless == HOPELESS == len(rewards):
                    rewards += [self._failed] * (outcome.samples - HOPELESS)
                    outcome.add(error, outcome.samples - HOPELESS)
                    break
        self._measured(sum(seconds), len(seconds))
        extra.log()
        return Judged(rewards, outcome, batch_error)

    def _call(self, seconds: float, arguments: dict[str, Any]) -> list[Any]:
        # A generator computes while it is read, so it is read within the limit too.
        def call() -> list[Any]:
            try:
                return listed(self._function(**arguments))
            except SystemExit as error:
                raise left(error) from error

        return call() if self._outside else call_within(seconds, call)


def is_hopeless(error: Exception) -> bool:
    """Whether an error says that other samples would fail as well."""
    return isinstance(error, TimeoutError | ConnectionError)


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
