"""A reward function that raises or hangs costs its samples a zero, each of them counted.

A guarded function is called with the whole batch, as TRL calls it. Only if that call raises, runs out of time
or returns nonsense is it called again sample by sample, each within the time limit. Samples that fail score
0, the first failure is logged, and the share that failed is reported with every batch through TRL's
``log_metric`` as ``rewards/<name>/failed``. Whether a function that fails on all samples ends the run is for
the trainer to say (:mod:`qerl.trainer.rewards`), which sees the samples of all processes.

The limit is one for a sample, and a batch takes longer than a sample. Limit times samples would let one
hanging sample hold a batch of a thousand for hours, so the batch gets the limit, and 1 % of it for every
sample besides: a function that takes up to a hundredth of its limit for a sample is called once. What a
sample really takes is known when the batch had to be called sample by sample; from then on every sample gets
twice that instead. If the first sixteen samples all run out of time, so would the others, which count as
failed without being tried.

Functions that judge each completion by itself (:func:`judges_alone`, the tasks' own) are called sample by
sample at once: a completion that is slow to judge then costs its own time limit and no second call.

What was given up: the second call repeats side effects, and a reward that compares the samples of a batch
with each other sees one sample at a time there. What a time limit cannot interrupt stands in
:mod:`qerl.tasks.time_limit`.
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
"""``f(prompts, completions, answer, **columns) -> rewards``, one a completion; None where it does not
apply.
"""

_NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric"})  # no lists with a value each

_BATCH_SHARE = 0.01
_HOPELESS = 16
_LARGEST = 3.4028234e38  # of FP32, in which TRL keeps rewards
_ASYNC_GRACE = 1.1  # a coroutine is cancelled at the limit; the alarm is for code that never awaits


@dataclass
class Outcome:
    """How the last call of a guarded function went.

    Attributes:
        samples: Completions that it was to judge.
        failed: Those that score 0 because the function failed.
        first: The first failure; None without failures.
    """

    samples: int = 0
    failed: int = 0
    first: Exception | None = None

    def add(self, error: Exception, samples: int = 1) -> None:
        """Counts samples that failed."""
        self.failed += samples
        self.first = self.first or error


def judges_alone(function: RewardFunction) -> RewardFunction:
    """The function, marked as one whose reward for a completion does not depend on the rest of the batch."""
    function.__dict__["judges_alone"] = True
    return function


def guarded(function: RewardFunction, timeout_s: float = 10.0) -> "GuardedReward":
    """The reward function with its failures counted instead of raised; one that is guarded, as it is.

    Args:
        function: Reward function with TRL's signature, plain or asynchronous. Its name is kept, for TRL logs
            by it.
        timeout_s: Seconds for a sample, above 0.

    Raises:
        QeRLError: The limit is no positive number of seconds.
    """
    return function if isinstance(function, GuardedReward) else GuardedReward(function, timeout_s)


class GuardedReward:
    """A guarded reward function; made by :func:`guarded`.

    Attributes:
        last: How the last call went.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise QeRLError(f"reward_timeout is {timeout_s!r}; it is a number of seconds for a sample.")
        if not 0 < timeout_s < math.inf:
            raise QeRLError(f"reward_timeout is {timeout_s}; it is a number of seconds above 0.")
        self._call = _synchronous(function) if _is_async(function) else _within(function)
        self._alone = bool(getattr(function, "judges_alone", False))
        self._timeout_s = timeout_s
        self._sample_s = _BATCH_SHARE * timeout_s
        self._said: set[str] = set()
        self.last = Outcome()
        self.__name__ = _name(function)

    def __call__(self, prompts: list, completions: list, **columns: Any) -> list[float | None]:
        """Rewards, one for each completion; arguments are TRL's."""
        if not can_interrupt():
            self._say("no limit", "Reward function %r runs without time limit: this is not the main thread.")
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
            columns["log_metric"](
                f"rewards/{self.__name__}/failed", self.last.failed / max(self.last.samples, 1)
            )
        return rewards

    def _batch(self, prompts: list, completions: list, columns: dict[str, Any]) -> list[float | None]:
        limit = self._timeout_s + self._sample_s * len(completions)
        try:
            rewards = self._call(limit, prompts=prompts, completions=completions, **columns)
            return _checked(rewards, len(completions))
        except Exception as error:
            # That call may have logged its extra columns already; a second set would be out of line.
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
            own = {key: value if key in _NOT_COLUMNS else [value[i]] for key, value in columns.items()}
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
    """Type and message of an error, in one line."""
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
    # A generator does its work where it is read, so that happens within the limit too.
    def call(seconds: float, **arguments: Any) -> Any:
        return call_within(seconds, lambda: _listed(function(**arguments)))

    return call


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    # One loop for all calls: clients that a reward keeps between calls belong to the loop that made them.
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
