"""The exploration of each run in a step: noise in norms or logits, and temperature.

Random numbers are keyed by (seed, step), so runs with one seed have the same noise, and a run has the noise
that `QeRLTrainer` would give it (`qerl.noise.draw`). Noise per sample has no counterpart there; since it is a
hundred times more, it is drawn on the device, and it differs between kinds of devices.

Two controllers have a state: `lab.study.batched.target` drives sigma to a target of KL, and the temperature
of `lab.study.batched.temperature` follows the entropy of another run's rollouts.

Legend: N norms that noise acts on, S runs, R samples of a run, D hidden width, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lab.study.arms import Arm, Run, contradiction
from lab.study.batched.model import BatchedModel
from lab.study.batched.norms import Norms
from lab.study.batched.sampler import clean_norms
from lab.study.batched.target import KLTarget
from lab.study.batched.temperature import FollowingTemperature
from lab.study.followed import Followed
from qerl.errors import QeRLError
from qerl.noise.draw import unit_noise
from qerl.noise.schedule import NoiseSchedule
from qerl.seeding import derive_seed, generator

_SHARED = (
    "weights", "rounding", "frozen_noise", "tuning", "lora_r", "noise_per", "noise_where", "noise_share",
    "noise_in_loss", "staleness",
)  # fmt: skip


def same_batch(one: Arm, other: Arm) -> bool:
    """Return True if runs of these arms can share a batch: they need the same base and the same passes."""
    balanced = one.correction == other.correction or "token_balance" not in (one.correction, other.correction)
    return balanced and all(getattr(one, name) == getattr(other, name) for name in _SHARED)


@dataclass(frozen=True)
class Exploration:
    """Noise and temperatures of a step.

    Attributes:
        norms: Weights of the norms in rollouts; None where all are clean.
        all_noisy: The same with noise on every sample, to score clean samples under the mixture.
        noisy_R: Which samples of a run are drawn with noise.
        logits_noise_SV: Added to logits; None for none.
        temperature_S: Temperatures of sampling.
        sigma_S: sigma of the noise in norms, or else in logits; 0 for none.
    """

    norms: Norms | None
    all_noisy: Norms | None
    noisy_R: list[bool]
    logits_noise_SV: torch.Tensor | None
    temperature_S: list[float]
    sigma_S: list[float]


class Explorers:
    """Noise and temperature of each run, step by step.

    Args:
        model: The model whose norms get noise.
        runs: The runs; their arms are of one batch (`same_batch`).
        steps: Optimizer steps of a run.
        prompts, group: Prompts of a step, and samples of each.
        followed: For each run with `match_entropy` the run that it follows; None for none.

    Raises:
        QeRLError: An arm contradicts itself, or a run to follow is missing or too short.
    """

    def __init__(
        self,
        model: BatchedModel,
        runs: Sequence[Run],
        steps: int,
        prompts: int,
        group: int,
        followed: Sequence[Followed | None] | None,
    ) -> None:
        self._model, self._runs, self._steps = model, runs, steps
        arm = runs[0].arm
        for run in runs:
            if reason := contradiction(run.arm, group):
                raise QeRLError(f"Arm {run.arm.name} {reason}.")
        noisy = round(arm.noise_share * group)
        self._noisy_R = [sample < noisy for _ in range(prompts) for sample in range(group)]
        self._share = noisy / group
        self._schedules = [_schedule(run.arm, steps) for run in runs]
        self._targets = [
            KLTarget(schedule, run.arm.noise_target_kl)
            if schedule is not None and run.arm.noise_target_kl is not None
            else None
            for run, schedule in zip(runs, self._schedules, strict=True)
        ]
        wanted = followed or [None] * len(runs)
        self._temperatures = [
            _temperature(run.arm, steps, own) for run, own in zip(runs, wanted, strict=True)
        ]

    @property
    def share(self) -> float:
        """Share of the samples that is drawn with noise."""
        return self._share

    def at(self, step: int) -> Exploration:
        """Noise and temperatures of a 0-based step."""
        sigmas = [self._sigma(index, step) for index in range(len(self._runs))]
        of_norms = [sigma if run.arm.noise else 0.0 for run, sigma in zip(self._runs, sigmas, strict=True)]
        norms, all_noisy = self._norms(step, of_norms) if any(of_norms) else (None, None)
        return Exploration(
            norms,
            all_noisy,
            self._noisy_R,
            self._logits_noise(step, sigmas),
            [
                run.arm.temperature
                * of_stage(run.arm.temperature_stages or [1.0], self._steps, step)
                * (1.0 if own is None else own.factor(step))
                for run, own in zip(self._runs, self._temperatures, strict=True)
            ],
            sigmas,
        )

    def observe(self, step: int, kl_S: Sequence[float], entropy_S: Sequence[float]) -> dict[str, list[float]]:
        """Update the controllers from a step's KL of noisy samples and entropy of rollouts, nats per token.

        Returns:
            `temperature/error` of each run, if any run follows another one.
        """
        for target, kl in zip(self._targets, kl_S, strict=True):
            if target is not None:
                target.observe(kl)
        if not any(self._temperatures):
            return {}
        both = zip(self._temperatures, entropy_S, strict=True)
        return {"temperature/error": [math.nan if own is None else own.observe(step, e) for own, e in both]}

    def state(self) -> dict[str, Any]:
        """The state of the controllers."""
        targets = [None if target is None else target.state() for target in self._targets]
        temperatures = [None if own is None else own.state() for own in self._temperatures]
        return {"targets": targets, "temperatures": temperatures}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state` returned."""
        for target, learned in zip(self._targets, state["targets"], strict=True):
            if target is not None:
                target.restore(learned)
        for temperature, learned in zip(self._temperatures, state["temperatures"], strict=True):
            if temperature is not None:
                temperature.restore(learned)

    def _sigma(self, index: int, step: int) -> float:
        """Standard deviation of the noise of a run: of its norms, or of its logits."""
        arm, schedule, target = self._runs[index].arm, self._schedules[index], self._targets[index]
        if arm.noise_sigma_stages is not None:
            return of_stage(arm.noise_sigma_stages, self._steps, step)
        if schedule is None:
            return arm.logits_noise
        sigma = schedule.sigma(step)
        if target is not None:
            sigma *= target.gain_for_rollout(step)
        return sigma if arm.noise else arm.logits_noise * sigma / schedule.sigma_start

    def _norms(self, step: int, sigmas: list[float]) -> tuple[Norms, Norms]:
        arm, samples = self._runs[0].arm, len(self._noisy_R)
        clean_N1D = self._model.norm_weights_ND[:, None]
        by_sample = arm.noise_per == "sample"
        drawn = {seed: self._eps(seed, step, by_sample) for seed in {run.seed for run in self._runs}}
        noisy = [
            clean_N1D
            + drawn[run.seed] * (clean_N1D.abs() if run.arm.noise_scale == "relative" else 1.0) * sigma
            for run, sigma in zip(self._runs, sigmas, strict=True)
        ]
        noisy_NSVD = torch.stack(noisy, dim=1)
        if not by_sample and arm.noise_where == "all" and all(self._noisy_R):
            norms = Norms(noisy_NSVD, [0] * samples, [0] * samples)
            return norms, norms
        clean_NS1D = clean_norms(self._model, samples).weights_NSVD
        weights_NSVD = torch.cat([clean_NS1D, noisy_NSVD], dim=2)
        every = [1 + sample if by_sample else 1 for sample in range(samples)]
        own = [variant if noisy else 0 for variant, noisy in zip(every, self._noisy_R, strict=True)]
        none = [0] * samples
        everywhere = arm.noise_where == "all"
        return (
            Norms(weights_NSVD, own if everywhere else none, own),
            Norms(weights_NSVD, every if everywhere else none, every),
        )

    def _eps(self, seed: int, step: int, by_sample: bool) -> torch.Tensor:
        """Unit noise [N, 1, D] of a step, or [N, R, D] of its samples."""
        (norms, width), device = self._model.norm_weights_ND.shape, self._model.device
        if not by_sample:
            return torch.stack([unit_noise(width, seed, step, norm) for norm in range(norms)])[:, None].to(
                device
            )
        draw = torch.Generator(device).manual_seed(derive_seed("noise by sample", seed, step))
        return torch.randn(norms, len(self._noisy_R), width, generator=draw, device=device)

    def _logits_noise(self, step: int, sigmas: list[float]) -> torch.Tensor | None:
        own = [0.0 if run.arm.noise else sigma for run, sigma in zip(self._runs, sigmas, strict=True)]
        if not any(own):
            return None
        size = self._model.sizes.vocabulary
        drawn = {
            seed: torch.randn(size, generator=generator("logits noise", seed, step))
            for seed in {run.seed for run in self._runs}
        }
        noise_SV = torch.stack([sigma * drawn[run.seed] for run, sigma in zip(self._runs, own, strict=True)])
        return noise_SV.to(self._model.device)


def _schedule(arm: Arm, steps: int) -> NoiseSchedule | None:
    """sigma by step; None for a run whose noise has no schedule."""
    if not arm.scheduled or arm.noise_sigma_stages is not None:
        return None
    return NoiseSchedule(
        arm.noise_sigma_start, arm.noise_sigma_end, arm.noise_stages, steps, arm.noise_schedule
    )


def of_stage(values: Sequence[float], steps: int, step: int) -> float:
    """The value of the stage of a 0-based step, with as many stages as values; steps left over belong to the
    last stage."""
    return values[min(step // (steps // len(values)), len(values) - 1)]


def _temperature(arm: Arm, steps: int, followed: Followed | None) -> FollowingTemperature | None:
    """The controller of a run's temperature; None if its arm follows no other arm."""
    if arm.match_entropy is None:
        return None
    if followed is None or len(followed.entropy) < steps:
        raise QeRLError(
            f"Arm {arm.name} follows the entropy of {arm.match_entropy}, whose run is missing or has fewer "
            f"than {steps} steps."
        )
    return FollowingTemperature(followed)
