"""The standard deviation of the noise, by training step."""

import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

from qerl.errors import QeRLError
from qerl.ranks import is_first_process

NoiseKind = Literal["exponential", "linear", "cosine", "logarithmic", "constant"]
SCHEDULES: tuple[str, ...] = get_args(NoiseKind)


@dataclass(frozen=True)
class NoiseSchedule:
    """sigma by training step.

    The run of M steps is divided into K stages of floor(M / K) steps; remaining steps belong to the last one.
    Stage 0 has no noise. Noisy stage k = 1..K-1 has, with t = (k - 1) / (K - 2) running from 0 to 1,

        exponential   sigma_start * (sigma_end / sigma_start)^t
        linear        sigma_start + (sigma_end - sigma_start) * t
        cosine        sigma_end + (sigma_start - sigma_end) * (1 + cos(pi t)) / 2
        logarithmic   sigma_start + (sigma_end - sigma_start) * ln(k) / ln(K - 1)
        constant      sigma_start

    so sigma_start is used at the first noisy stage, the only one if K = 2, and sigma_end at the last.

    Paper and released code differ. The paper's exponent is (k - 1) / (K - 1), which never reaches sigma_end
    (with K = 10 and 1e-2 -> 1e-4 the last stage has 1.7e-4); the released code's is (k - 1) / (K - 2), as
    here. The paper gives a formula only for the exponential shape; the other shapes are ours, between the
    same two ends.

    Attributes:
        sigma_start: Standard deviation at stage 1, in the units of the norm weights; above 0.
        sigma_end: Standard deviation at stage K-1; above 0. Unused by ``constant``.
        stages: K, at least 2.
        total_steps: M, optimizer steps of the whole run; at least K.
        kind: Shape of the decay, one of ``SCHEDULES``.

    Raises:
        QeRLError: A value outside these ranges.
    """

    sigma_start: float
    sigma_end: float
    stages: int
    total_steps: int
    kind: str = "exponential"

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise QeRLError(f"Noise schedule {self.kind!r} is unknown; choose one of {', '.join(SCHEDULES)}.")
        for name, sigma in (("sigma_start", self.sigma_start), ("sigma_end", self.sigma_end)):
            if not (math.isfinite(sigma) and sigma > 0):
                raise QeRLError(
                    f"noise_{name} is {sigma}; it must be > 0. To train without noise, set noise: false."
                )
        if self.stages < 2:
            raise QeRLError(
                f"The noise schedule has {self.stages} stages; it needs at least 2, as stage 0 has no noise."
            )
        if self.total_steps < self.stages:
            raise QeRLError(
                f"The noise schedule has {self.stages} stages but the run only {self.total_steps} steps; "
                f"train for at least {self.stages} steps or use fewer stages."
            )
        if self.sigma_end > self.sigma_start and self.kind != "constant" and is_first_process():
            warnings.warn(
                f"Noise grows during training: sigma_end {self.sigma_end} > sigma_start {self.sigma_start}.",
                stacklevel=3,
            )

    def stage(self, step: int) -> int:
        """Return the stage, 0..K-1, of a 0-based optimizer step."""
        return min(step // (self.total_steps // self.stages), self.stages - 1)

    def sigma(self, step: int) -> float:
        """Return the standard deviation of Z at a 0-based optimizer step; 0 in stage 0."""
        stage = self.stage(step)
        if stage == 0:
            return 0.0
        if self.kind == "constant" or self.stages == 2:
            return self.sigma_start
        t = (stage - 1) / (self.stages - 2)
        if self.kind == "exponential":
            return self.sigma_start * (self.sigma_end / self.sigma_start) ** t
        if self.kind == "cosine":
            t = (1 - math.cos(math.pi * t)) / 2
        elif self.kind == "logarithmic":
            t = math.log(stage) / math.log(self.stages - 1)
        return self.sigma_start + (self.sigma_end - self.sigma_start) * t
