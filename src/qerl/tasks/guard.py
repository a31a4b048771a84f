"""Reward functions that may raise or hang: a sample on which one fails is counted, and the run goes on.

A guarded function is called with the whole batch, as TRL calls it. If that call raises, runs out of time or
returns nonsense, and only then, the function is called again for each sample, each time within the time
limit (:mod:`qerl.tasks.judging`, and :mod:`qerl.tasks.together` for coroutines). A sample that fails
scores 0, the first failure is logged, and every batch reports the share of failed samples through TRL's
``log_metric`` as ``rewards/<name>/failed``. Whether a function that fails on all samples ends the run is
decided by the trainer (:mod:`qerl.trainer.rewards`), which sees the samples of all processes.

The rewards of a function that names a column (:func:`stratified`) are also logged by the values of that
column, failed samples as the zeros that they score.

Functions that judge each completion by itself (:func:`judges_alone`; the tasks' own do) are called sample by
sample from the start: a completion that is slow to judge then costs its own time limit and no second call.
Those that ask something outside of this process (:func:`judges_outside`: a server, a sandbox) set their own
time limits, and a sample on which they fail has no reward, because the fault is not the sample's.

Given up: the second call repeats side effects, and a reward that compares the samples of a batch with each
other sees only one sample there. :mod:`qerl.calls` says what a time limit cannot interrupt.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

from qerl.calls.alarm import can_interrupt
from qerl.calls.beside import is_async
from qerl.errors import QeRLError
from qerl.tasks.judging import Batch, Judged, Judging, RewardFunction, mark, name_of
from qerl.tasks.together import Together, Waiting, can_begin_early

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable)


def judges_alone(function: Function) -> Function:
    """Mark a function whose reward for a completion does not depend on the rest of the batch; return it."""
    function.__dict__["judges_alone"] = True
    return function


def judges_outside(function: Function) -> Function:
    """Mark a function that asks something outside of this process about each completion; return it.

    It limits its own time, and how many of its calls go on at once; where it fails, a sample has no reward.
    """
    function.__dict__["judges_outside"] = True
    return judges_alone(function)


def stratified(function: RewardFunction, column: str) -> RewardFunction:
    """Mark a function whose rewards are to be logged by the values of a column of the rows too; return it."""
    function.__dict__["strata"] = column
    return function


def stratum(column: str, value: Any) -> str:
    """What the part of a task's problems is called in which a column has a value: ``steps_2``."""
    return f"{column}_{value}"


def guarded(
    function: RewardFunction,
    timeout_s: float = 10.0,
    together: Together | None = None,
) -> "GuardedReward":
    """Wrap a reward function so that its failures are counted instead of raised.

    Args:
        function: A reward function with TRL's signature, plain or asynchronous; one that is guarded already
            is returned as it is, or guarded anew if its calls are to begin early. The wrapper has its name,
            by which TRL logs.
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
    return GuardedReward(function, timeout_s, together or Together())


class GuardedReward:
    """A reward function whose failures are counted; :func:`guarded` makes it.

    Attributes:
        function: What is guarded.
        last: What came of the last call.
        judges_alone, judges_outside, computes_too: The function's marks.
    """

    def __init__(self, function: RewardFunction, timeout_s: float, together: Together) -> None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise QeRLError(f"reward_timeout is {timeout_s!r}; it must be a number of seconds per sample.")
        if not 0 < timeout_s < math.inf:
            raise QeRLError(f"reward_timeout is {timeout_s}; it must be a number of seconds above 0.")
        self.function = function
        self.judges_alone = bool(mark(function, "judges_alone"))
        self.judges_outside = bool(mark(function, "judges_outside"))
        self.computes_too = bool(mark(function, "computes_too"))
        marks = (self.judges_alone, self.judges_outside)
        early = together.early and can_begin_early(function)
        self._waits = early or is_async(function)
        self._judging = (
            Waiting(function, timeout_s, *marks, together, early)
            if self._waits
            else Judging(function, timeout_s, *marks)
        )
        self._strata: str | None = mark(function, "strata")
        self._said: set[str] = set()
        self.last = Judged([])
        self.__name__ = name_of(function)

    def __call__(
        self, /, prompts: list | None = None, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        """Return one reward per sample; the arguments are those that TRL passes, of which any may be missing
        that the function does not read."""
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
            # One call for each sample: the trainer takes the mean of what it is told, over all processes.
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
