"""sigma driven until sampler and trainer are as far apart as asked for.

What noise of a given sigma does to a policy differs by model, format and layer, and changes while the policy
trains; KL(sampler || trainer) in nats per token is what it does, and every step measures it. For small noise
KL = c sigma^2 with an unknown c. So the target falls with the square of the schedule,

    target(step) = kl_start * (sigma_schedule(step) / sigma_start)^2,

and sigma(step) = gain * sigma_schedule(step) meets it in every stage with the same gain, sqrt(kl_start / c) /
sigma_start: one number is all that must be found. A measured KL says by how much the gain of its rollout was
off; the present gain goes half of the way, in logarithms, to the gain that would have been right. Half
averages over steps, as a step's KL is noisy and heavy-tailed. A step that goes on with an old rollout gives
the same answer again and moves on towards it, never beyond.

What is given up: KL without noise is not 0, as kernels and rounding of sampler and trainer differ. A target
near that floor is met by noise that is too small.
"""

import math
from typing import TypedDict

from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule

_SHARE = 0.5
_LARGEST_ERROR = math.log(4.0)
"""Of the gain in one measurement, in logarithms: one outlier of KL moves sigma by a factor of 2 at most."""
_LARGEST_GAIN = math.log(100.0)
"""In logarithms: sigma stays within a factor of 100 of the schedule's."""


class TargetState(TypedDict):
    """What a resumed run needs; all of them numbers that JSON keeps exactly."""

    log_gain: float
    sampled_step: int
    sampled_log_gain: float


class KLTarget:
    """The factor of the schedule's sigma that meets a target of KL(sampler || trainer).

    Args:
        schedule: sigma by step, from which the noise starts and with which the target falls.
        kl_start: Target at the schedule's `sigma_start`, nats per token; above 0.

    Raises:
        QeRLError: The target is not a positive number.
    """

    def __init__(self, schedule: NoiseSchedule, kl_start: float) -> None:
        if not (math.isfinite(kl_start) and kl_start > 0):
            raise QeRLError(
                f"The target of KL is {kl_start}; it must be a positive number of nats per token."
            )
        self._schedule = schedule
        self._kl_start = kl_start
        self._log_gain = 0.0
        self._sampled_step = 0
        self._sampled_log_gain = 0.0

    def at(self, step: int) -> float:
        """The target of a 0-based optimizer step, nats per token; 0 in stage 0."""
        return self._kl_start * (self._schedule.sigma(step) / self._schedule.sigma_start) ** 2

    def gain_for_rollout(self, step: int) -> float:
        """Factor of the schedule's sigma for the rollout of a step, to which later measurements belong."""
        self._sampled_step, self._sampled_log_gain = step, self._log_gain
        return math.exp(self._log_gain)

    def observe(self, kl: float) -> None:
        """Learn from the KL that was measured on the last rollout, nats per token.

        Nothing is learned from a rollout without noise, nor from a KL of NaN, as a step has that computes no
        sample.
        """
        target = self.at(self._sampled_step)
        if target == 0 or math.isnan(kl):
            return
        error = 0.5 * (math.log(target) - math.log(kl)) if kl > 0 else math.inf
        right = self._sampled_log_gain + _clip(error, _LARGEST_ERROR)
        self._log_gain = _clip(self._log_gain + _SHARE * (right - self._log_gain), _LARGEST_GAIN)

    def state(self) -> TargetState:
        """All that was learned."""
        return {
            "log_gain": self._log_gain,
            "sampled_step": self._sampled_step,
            "sampled_log_gain": self._sampled_log_gain,
        }

    def restore(self, state: TargetState) -> None:
        """Go on where `state` was taken."""
        self._log_gain = state["log_gain"]
        self._sampled_step = state["sampled_step"]
        self._sampled_log_gain = state["sampled_log_gain"]


def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)
