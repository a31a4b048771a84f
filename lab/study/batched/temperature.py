"""A temperature controller that gives a run's rollouts the entropy of another run's noisy rollouts.

It is the control for "noise helps because samples vary more". The followed run has the same seed: the same
problems in the same order, and the same uniform numbers, so the effect of a step's problems on the entropy is
in both curves and is not an error of the temperature.

The steps before the followed run's noise begins show by which factor the two entropies differ without noise
(1 if weights and learning rate are the same). From then on the *tracking error* of a step is

    log(entropy followed / own entropy) - its mean over the steps before the noise.

The error is averaged exponentially, and a share of the average is added to the logarithm of the next step's
temperature: an integral controller. Average and share are slow on purpose. A step of 64 short samples
measures an entropy with an error of a tenth, and a fast controller answers that with temperatures between a
third and two. This one moves by hundredths and corrects a lasting difference within some ten steps: near a
temperature of 1 the entropy of SmolLM2 on word problems goes with the third to fourth power of the
temperature, that of peaked policies with the first to second. Where the followed run has no noise the factor
is exactly 1, and the controller does not move.
"""

import math
from typing import TypedDict

from lab.study.followed import Followed

GAIN = 0.15
"""Share of the averaged error by which the logarithm of the temperature moves in a step."""

SMOOTHING = 0.5
"""Weight of the present step in the average."""

_LARGEST = math.log(3.0)
"""Bound of the temperature's factor, up and down, in logarithms."""


class TemperatureState(TypedDict):
    """State that a resumed run needs."""

    log_temperature: float
    smoothed: float
    clean_sum: float
    clean_steps: int


class FollowingTemperature:
    """The factor of a run's temperature, step by step.

    Args:
        followed: The run that is followed, with its noise after its first steps.
    """

    def __init__(self, followed: Followed) -> None:
        self._entropy = followed.entropy
        self._noisy = [sigma != 0.0 for sigma in followed.sigma]
        self._begins = self._noisy.index(True) if True in self._noisy else len(self._noisy)
        self._state = TemperatureState(log_temperature=0.0, smoothed=0.0, clean_sum=0.0, clean_steps=0)

    def factor(self, step: int) -> float:
        """Factor of the temperature in a 0-based step."""
        return math.exp(self._state["log_temperature"]) if self._noisy[step] else 1.0

    def observe(self, step: int, entropy: float) -> float:
        """Update the controller from the entropy of a step's rollouts, nats per token.

        Returns:
            The tracking error; NaN, without an update, if one of the two entropies is missing or not above 0.
        """
        state, wanted = self._state, self._entropy[step]
        if wanted is None or not (wanted > 0 and 0 < entropy < math.inf):
            return math.nan
        apart = math.log(wanted / entropy)
        if step < self._begins:
            state["clean_sum"] += apart
            state["clean_steps"] += 1
        error = apart - state["clean_sum"] / max(1, state["clean_steps"])
        if self._noisy[step]:
            state["smoothed"] += SMOOTHING * (error - state["smoothed"])
            moved = state["log_temperature"] + GAIN * state["smoothed"]
            state["log_temperature"] = min(max(moved, -_LARGEST), _LARGEST)
        return error

    def state(self) -> TemperatureState:
        """The state of the controller."""
        return self._state.copy()

    def restore(self, state: TemperatureState) -> None:
        """Resume from a state that `state` returned."""
        self._state = state.copy()
