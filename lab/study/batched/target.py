"""A controller of sigma that holds a given KL between sampler and trainer.

The effect of noise of a given sigma on a policy differs by model, format and layer, and changes while the
policy trains; every step measures it as KL(sampler || trainer) in nats per token. For small noise this KL is
c sigma^2 with an unknown c. So the target falls with the square of the schedule,

    target(step) = kl_start * (sigma_schedule(step) / sigma_start)^2,

and sigma(step) = gain * sigma_schedule(step) meets it in every stage with the same gain, sqrt(kl_start / c) /
sigma_start: only one number has to be found. A measured KL shows by how much the gain of its rollout was off;
the current gain moves half of the way, in logarithms, to the gain that would have been right. Moving by half
averages over steps, since the KL of a step is noisy and heavy-tailed. A step that reuses an old rollout gives
the same estimate again and moves further towards it, never beyond.

Given up: without noise KL is not 0, since kernels and rounding of sampler and trainer differ. A target near
that floor is met by noise that is too small.
"""

import math
from typing import TypedDict

from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule

_SHARE = 0.5
_LARGEST_ERROR = math.log(4.0)
"""Largest error of the gain in one measurement, in logarithms: one outlier of KL moves sigma by a factor of
at most 2."""
_LARGEST_GAIN = math.log(100.0)
"""Largest gain, in logarithms: sigma stays within a factor of 100 of the schedule's."""


class TargetState(TypedDict):
    """State that a resumed run needs; JSON keeps all of its numbers exactly."""

    log_gain: float
    sampled_step: int
    sampled_log_gain: float


class KLTarget:
    """The factor of the schedule's sigma that meets a target of KL(sampler || trainer).

    Args:
        schedule: sigma by step; the noise starts from it, and the target falls with its square.
        kl_start: Target at the schedule's `sigma_start`, nats per token; above 0.

    Raises:
        QeRLError: The target is not a positive number.
    """

    def __init__(self, schedule: NoiseSchedule, kl_start: float) -> None:
        if not (math.isfinite(kl_start) and kl_start > 0):
            raise QeRLError(f"noise_target_kl is {kl_start}; it must be a positive number of nats per token.")
        self._schedule = schedule
        self._kl_start = kl_start
        self._log_gain = 0.0
        self._sampled_step = 0
        self._sampled_log_gain = 0.0

    def at(self, step: int) -> float:
        """The target of a 0-based optimizer step, nats per token; 0 in stage 0."""
        return self._kl_start * (self._schedule.sigma(step) / self._schedule.sigma_start) ** 2

    def gain_for_rollout(self, step: int) -> float:
        """Factor of the schedule's sigma for a step's rollout, to which later calls of `observe` refer."""
        self._sampled_step, self._sampled_log_gain = step, self._log_gain
        return math.exp(self._log_gain)

    def observe(self, kl: float) -> None:
        """Update the gain from the KL that was measured on the last rollout, nats per token.

        A rollout without noise changes nothing, nor does a KL of NaN, which a step without computed samples
        has.
        """
        target = self.at(self._sampled_step)
        if target == 0 or math.isnan(kl):
            return
        error = 0.5 * (math.log(target) - math.log(kl)) if kl > 0 else math.inf
        right = self._sampled_log_gain + _clip(error, _LARGEST_ERROR)
        self._log_gain = _clip(self._log_gain + _SHARE * (right - self._log_gain), _LARGEST_GAIN)

    def state(self) -> TargetState:
        """The state of the controller."""
        return {
            "log_gain": self._log_gain,
            "sampled_step": self._sampled_step,
            "sampled_log_gain": self._sampled_log_gain,
        }

    def restore(self, state: TargetState) -> None:
        """Resume from a state that `state` returned."""
        self._log_gain = state["log_gain"]
        self._sampled_step = state["sampled_step"]
        self._sampled_log_gain = state["sampled_log_gain"]


def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)
