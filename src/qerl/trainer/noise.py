"""The noise of a trainer's rollouts by step.

It is a function of settings, seed, step and, where it is relative, the weights |w| of the norms.
"""

from collections.abc import Callable
from functools import cached_property

from torch import nn

from qerl.noise.draw import AdaptiveNoise
from qerl.rollout.engine import NormOffsets
from qerl.settings.config import QeRLConfig


class RolloutNoise:
    """The noise of a trainer's rollouts; none where the settings say so.

    Args:
        args: Settings of the run.
        model: The policy, PEFT-wrapped or not. It is run once on two tokens, when noise is first asked for.
        steps: Says how many optimizer steps the run has; asked when noise is first asked for.
    """

    def __init__(self, args: QeRLConfig, model: nn.Module, steps: Callable[[], int]) -> None:
        self._args, self._model, self._steps = args, model, steps

    @cached_property
    def _draws(self) -> AdaptiveNoise:
        schedule = self._args.noise_schedule_of(self._steps())
        return AdaptiveNoise(self._model, schedule, self._args.seed, self._args.noise_scale)

    def for_rollout(self, step: int) -> tuple[NormOffsets, dict[str, float]]:
        """Z for the rollout of a 0-based optimizer step, empty where there is none, and what is logged."""
        if not self._args.noise:
            return {}, {}
        offsets = self._draws.offsets(step)
        return offsets, {"noise/sigma": self._draws.schedule.sigma(step), "noise/norms": float(len(offsets))}
