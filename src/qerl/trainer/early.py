"""Rewards that begin while the rollout still decodes: what a finished sample's functions are called with.

TRL calls reward functions with lists of all samples, when all are finished. What it would hand them of one
sample is known as soon as the engine has finished that one, and made here in the same way.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl import GRPOTrainer

from qerl.errors import QeRLError
from qerl.rollout.engine import RolloutEngine
from qerl.tasks.together import Together
from qerl.trainer.timing import HIDDEN, StepClock
from qerl.trainer.trl.decoded import decoded

_NOT_HANDED_ON = ("prompt", "completion", "completion_ids")
"""Columns of the data that TRL keeps from reward functions."""


def check_tells(engine: RolloutEngine) -> None:
    """Refuse an engine that does not tell which completions are finished.

    Raises:
        QeRLError: Its `generate` has no argument `ended`.
    """
    try:
        inspect.signature(engine.generate).bind([], 1, None, None, None, None)  # as the trainer calls it
    except TypeError as error:
        raise QeRLError(
            "early_rewards needs an engine whose generate has the argument `ended`, and that of "
            f"{type(engine).__name__} has not; add it behind `seeds`, as RolloutEngine.generate has it, or "
            "remove early_rewards."
        ) from error


class EarlyRewards:
    """Begins the rewards of a trainer's samples as they are finished.

    Args:
        trainer: Its tokenizer and state are read.
        calls: Its reward functions, of which some begin early.
    """

    def __init__(self, trainer: GRPOTrainer, calls: Together) -> None:
        self._trainer, self._calls = trainer, calls
        self._inputs: list[dict[str, Any]] = []

    @contextmanager
    def of(self, inputs: list[dict[str, Any]]) -> Iterator[None]:
        """Within the block these rows are sampled and scored; calls that are left behind it are given up.

        Args:
            inputs: As TRL has them, one for each sample.
        """
        self._inputs = inputs
        self._calls.take_seconds()  # which nobody asked for
        try:
            yield
        finally:
            self._inputs = []
            self._calls.abandon()

    def begin(self, row: int, prompt_ids: list[int], token_ids: list[int]) -> None:
        """Begin the calls for a finished sample.

        Args:
            row: Of the inputs.
            prompt_ids: Tokens of its prompt.
            token_ids: Its completion.
        """
        if not self._inputs:  # a rollout that nobody scores
            return
        given = self._inputs[row]
        columns = {name: [value] for name, value in given.items() if name not in _NOT_HANDED_ON}
        of_sample = {
            "prompts": [given["prompt"]],
            "completions": [decoded(self._trainer, given["prompt"], prompt_ids, token_ids)],
            "completion_ids": [token_ids],
            "trainer_state": self._trainer.state,
            "log_extra": self._trainer._log_completion_extra,
            "log_metric": self._trainer._log_metric,
        }
        self._calls.begin(row, columns | of_sample)

    @contextmanager
    def waiting(self, clock: StepClock) -> Iterator[None]:
        """Within the block rewards are waited for; what went on before is counted as hidden."""
        clock.add(HIDDEN, self._calls.take_seconds())
        yield
        self._calls.take_seconds()
