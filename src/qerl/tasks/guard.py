"""Reward functions that may raise or hang: a sample on which one fails scores 0, and is counted.

A guarded function is called with the whole batch, as TRL calls it. If that call raises, runs out of time or
returns nonsense, and only then, the function is called again for each sample, each time within the time
limit. A sample that fails scores 0, the first failure is logged, and every batch reports the share of failed
samples through TRL's ``log_metric`` as ``rewards/<name>/failed``. Whether a function that fails on all
samples ends the run is decided by the trainer (:mod:`qerl.trainer.rewards`), which sees the samples of all
processes.

The user's limit is for one sample, and a batch takes longer than a sample. The limit times the number of
samples would let one hanging sample hold a batch of a thousand for hours. So a batch gets the limit itself
plus 1 % of it per sample, which suffices for a function that takes up to a hundredth of its limit per sample.
Once a batch had to be called sample by sample, the time that a sample really takes is known, and from then on
a batch gets twice that per sample instead of the 1 %. If the first sixteen samples all run out of time, the
others would too; they count as failed without being tried.

The rewards of a function that names a column (:func:`stratified`) are also logged by the values of that
column, failed samples as the zeros that they score.

Functions that judge each completion by itself (:func:`judges_alone`; the tasks' own do) are called sample by
sample from the start: a completion that is slow to judge then costs its own time limit and no second call.

Given up: the second call repeats side effects, and a reward that compares the samples of a batch with each
other sees only one sample there. :mod:`qerl.tasks.time_limit` says what a time limit cannot interrupt.
"""

import asyncio
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qerl.errors import QeRLError
from qerl.tasks.time_limit import call_within, can_interrupt

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., list[float | None]]
"""``f(prompts, completions, answer, **columns) -> rewards``: one reward per completion, None where the
function does not apply."""

NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric"})
"""Arguments that TRL passes to reward functions and that are not one value per sample."""

_BATCH_SHARE = 0.01  # of the limit, added per sample of a batch
_HOPELESS = 16  # samples in a row that run out of time, after which the rest of the batch is not tried
_LARGEST = 3.4028234e38  # the largest FP32 number; TRL keeps rewards in FP32
_ASYNC_GRACE = 1.1  # a coroutine is cancelled at the limit; the later alarm stops code that never awaits


@dataclass
class Outcome:
    """How one call of a guarded function went.

    Attributes:
        samples: Number of completions that the function was to judge.
        failed: Number of completions that score 0 because the function failed on them.
        first: The first failure; None if there was none.
    """

    samples: int = 0
    failed: int = 0
    first: Exception | None = None

    def add(self, error: Exception, samples: int = 1) -> None:
        """Count samples on which the function failed with this error."""
        self.failed += samples
        self.first = self.first or error


def judges_alone(function: RewardFunction) -> RewardFunction:
    """Mark a function whose reward for a completion does not depend on the rest of the batch; return it."""
    function.__dict__["judges_alone"] = True
    return function


def stratified(function: RewardFunction, column: str) -> RewardFunction:
    """Mark a function whose rewards are to be logged by the values of a column of the rows too; return it."""
    function.__dict__["strata"] = column
    return function


def stratum(column: str, value: Any) -> str:
    """What the part of a task's problems is called in which a column has a value: ``steps_2``."""
    return f"{column}_{value}"


def guarded(function: RewardFunction, timeout_s: float = 10.0) -> "GuardedReward":
    """Wrap a reward function so that its failures are counted instead of raised.

    Args:
        function: A reward function with TRL's signature, plain or asynchronous; one that is guarded already
            is returned as it is. The wrapper has its name, by which TRL logs.
        timeout_s: Seconds per sample, above 0.

    Raises:
        QeRLError: ``timeout_s`` is not a positive number.
    """
    return function if isinstance(function, GuardedReward) else GuardedReward(function, timeout_s)


class GuardedReward:
    """A reward function whose failures are counted; :func:`guarded` makes it.

    Attributes:
        last: The outcome of the last call.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise QeRLError(f"reward_timeout is {timeout_s!r}; it must be a number of seconds per sample.")
        if not 0 < timeout_s < math.inf:
            raise QeRLError(f"reward_timeout is {timeout_s}; it must be a number of seconds above 0.")
        self._call = _synchronous(function) if _is_async(function) else _within(function)
        self._alone = bool(getattr(function, "judges_alone", False))
        self._strata: str | None = getattr(function, "strata", None)
        self._timeout_s = timeout_s
        self._sample_s = _BATCH_SHARE * timeout_s
        self._said: set[str] = set()
        self.last = Outcome()
        self.__name__ = _name(function)

    def __call__(self, prompts: list, completions: list, **columns: Any) -> list[float | None]:
        """Return one reward per completion; the arguments are those that TRL passes."""
        if not can_interrupt():
            self._say(
                "no limit",
                "Reward function %r runs without a time limit, because this is not the main thread.",
            )
        self.last = Outcome(len(completions))
        if self._alone:
            rewards = self._by_sample(prompts, completions, columns)
        else:
            rewards = self._batch(prompts, completions, columns)
        if self.last.failed:
            text = (
                "Reward function %r failed on %d of %d samples, which score 0 (first failure: %s). Later "
                "failures are counted in rewards/%s/failed."
            )
            first = describe(self.last.first)
            self._say("failed", text, self.last.failed, self.last.samples, first, self.__name__)
        if "log_metric" in columns:
            self._log(rewards, columns, columns["log_metric"])
        return rewards

    def _log(
        self, rewards: list[float | None], columns: dict[str, Any], log: Callable[[str, float], None]
    ) -> None:
        log(f"rewards/{self.__name__}/failed", self.last.failed / max(self.last.samples, 1))
        if self._strata is not None:
            # One call for each sample: the trainer takes the mean of what it is told, over all processes.
            for value, reward in zip(columns.get(self._strata, ()), rewards, strict=False):
                if reward is not None:
                    log(f"rewards/{self.__name__}/{stratum(self._strata, value)}", reward)

    def _batch(self, prompts: list, completions: list, columns: dict[str, Any]) -> list[float | None]:
        limit = self._timeout_s + self._sample_s * len(completions)
        try:
            rewards = self._call(limit, prompts=prompts, completions=completions, **columns)
            return _checked(rewards, len(completions))
        except Exception as error:
            # That call may have logged its extra columns already, so the second call must not log them again.
            if "log_extra" in columns:
                columns = columns | {"log_extra": lambda *_: None}
            rewards = self._by_sample(prompts, completions, columns)
            if not self.last.failed:
                text = "Reward function %r failed on a batch of %d (%s) and was called sample by sample."
                self._say("batch", text, len(completions), describe(error))
            return rewards

    def _by_sample(self, prompts: list, completions: list, columns: dict[str, Any]) -> list[float | None]:
        rewards: list[float | None] = []
        seconds: list[float] = []
        timeouts = 0
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            own = {key: value if key in NOT_COLUMNS else [value[i]] for key, value in columns.items()}
            started = time.perf_counter()
            try:
                rewards += _checked(
                    self._call(self._timeout_s, prompts=[prompt], completions=[completion], **own), 1
                )
                seconds.append(time.perf_counter() - started)
            except Exception as error:
                rewards.append(0.0)
                self.last.add(error)
                timeouts += isinstance(error, TimeoutError)
                if timeouts == _HOPELESS == len(rewards):
                    rewards += [0.0] * (len(completions) - len(rewards))
                    self.last.add(error, len(completions) - _HOPELESS)
                    break
        if seconds:
            self._sample_s = 2 * sum(seconds) / len(seconds)
        return rewards

    def _say(self, what: str, text: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(text, self.__name__, *values)


def describe(error: BaseException | None) -> str:
    """The type and the message of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _name(function: Callable) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _is_async(function: Callable) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _within(function: RewardFunction) -> Callable[..., Any]:
    # A generator computes while it is read, so it is read within the limit too.
    def call(seconds: float, **arguments: Any) -> Any:
        return call_within(seconds, lambda: _listed(function(**arguments)))

    return call


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    # One event loop for all calls, because a client that a reward keeps between calls belongs to its loop.
    runner = asyncio.Runner()

    async def limited(seconds: float, **arguments: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return _listed(await function(**arguments))
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no result within {seconds:g} s") from error

    def call(seconds: float, **arguments: Any) -> Any:
        return call_within(_ASYNC_GRACE * seconds, lambda: runner.run(limited(seconds, **arguments)))

    return call


def _listed(rewards: Any) -> list[Any]:
    if isinstance(rewards, str | bytes | Mapping | set):
        raise TypeError(f"the rewards are a {type(rewards).__name__}, not a list")
    return list(rewards)


def _checked(rewards: list[Any], expected: int) -> list[float | None]:
    if len(rewards) != expected:
        raise ValueError(f"{len(rewards)} rewards for {expected} completions")
    for reward in rewards:
        if isinstance(reward, str | bytes):
            raise TypeError(f"a reward is the text {reward!r}, not a number")
    values = [None if reward is None else float(reward) for reward in rewards]
    if any(value is not None and not abs(value) <= _LARGEST for value in values):
        raise ValueError("a reward is not finite")
    return values
