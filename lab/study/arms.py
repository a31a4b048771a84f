"""An arm of a study: one way of training; a study compares several.

Fields that `QeRLConfig` has too have its names and units, so that findings of a study can be copied into a
recipe; the defaults are those of a small study. The other fields are controls for studies alone: ways of
exploring that need no noise in the weights. `lab.study.spec` checks each field by its annotation when an arm
is read from a file.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from qerl.noise.schedule import NoiseKind
from qerl.settings.checks import Count, NonNegative, Positive, PositiveInt, PositiveShare, Text
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding, WeightFormatName


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Attributes:
        name: Unique within a study.
        weights: Format of the frozen linear layers, by its name in `qerl.weight_formats`.
        rounding: How an unquantised checkpoint is rounded, `mse` or `rtn`.
        frozen_noise: Relative error (root mean square) of Gaussian noise that is added once to the frozen
            linear weights: the control for "any error of the weights would do".
        tuning: `lora` trains adapters; `full` trains all weights of the model, of which each run then has a
            copy.
        lora_r: Rank of the adapters; alpha is the same.
        learning_rate: The only learning rate of the arm; None for those of the study.
        learning_rates: The arm's own grid, from which tuning seeds choose; None for the study's grid.
        noise: Whether rollouts have noise in their norms, as the `noise_` fields say.
        noise_sigma_start, noise_sigma_end, noise_stages, noise_schedule: The schedule of sigma.
        noise_scale: `absolute`, Z = sigma eps, or `relative`, Z = sigma |w| eps.
        noise_target_kl: Mean KL(sampler || trainer) in nats per token to which sigma is driven at the
            schedule's start; the target falls with the square of the schedule. None leaves sigma to the
            schedule.
        noise_sigma_stages: sigma of each stage, in place of the schedule, with one stage of the run per
            number; 0 for no noise. Numbers that were fitted on unreported seeds hold a KL without a
            controller (`lab.study.doses`).
        noise_per: One Z per `step`, or one per `sample`.
        noise_where: Whether the noise acts on the prompt too (`all`) or in decoding only (`decode`).
        noise_share: Share of the samples of each group that are drawn with noise.
        noise_in_loss: Whether the loss's forward pass has the rollout's Z too.
        correction: How the loss corrects for the ratio of trainer to sampler: `none`; `token_truncate`, at
            most `correction_max`; `token_one_sided`; `token_balance` against the mixture of clean and noisy
            samples.
        correction_max: Upper bound of the ratio.
        temperature: Temperature of sampling.
        match_entropy: Name of an arm with noise whose rollout entropy a controlled temperature follows, seed
            by seed and step by step.
        temperature_stages: Factors of the sampler's temperature, with one stage of the run per number; the
            loss stays that of the policy at `temperature`. None for 1 throughout.
        logits_noise: Standard deviation of Gaussian noise on the logits, one draw per token id and step.
        entropy_bonus: Coefficient of the policy's entropy in the objective.
        pass_at_k: k of pass@k advantages, which are in units of the reward (`scale_rewards: none`); None
            means advantages of GRPO.
        loss_type, importance_sampling_level, epsilon, epsilon_high, delta, use_rollout_logprobs: As in
            `QeRLConfig`. A rollout has one update, so the ratio is 1 unless it is taken to the sampler
            (`use_rollout_logprobs`).
        staleness: Number of steps by which the sampling adapter is behind the trained one; until that step
            the fresh adapter samples.
    """

    name: Text
    weights: WeightFormatName = DEFAULT_FORMAT
    rounding: Rounding = DEFAULT_ROUNDING
    frozen_noise: NonNegative = 0.0
    tuning: Literal["lora", "full"] = "lora"
    lora_r: PositiveInt = 16
    learning_rate: Positive | None = None
    learning_rates: Annotated[list[Positive], Field(min_length=2)] | None = field(default=None, hash=False)
    noise: bool = False
    noise_sigma_start: Positive = 1e-2
    noise_sigma_end: Positive = 5e-4
    noise_stages: Annotated[int, Field(ge=2)] = 5
    noise_schedule: NoiseKind = "exponential"
    noise_scale: Literal["absolute", "relative"] = "absolute"
    noise_target_kl: Positive | None = None
    noise_sigma_stages: Annotated[list[NonNegative], Field(min_length=1)] | None = field(
        default=None, hash=False
    )
    noise_per: Literal["step", "sample"] = "step"
    noise_where: Literal["all", "decode"] = "all"
    noise_share: PositiveShare = 1.0
    noise_in_loss: bool = False
    correction: Literal["none", "token_truncate", "token_one_sided", "token_balance"] = "token_truncate"
    correction_max: Annotated[float, Field(ge=1)] = 3.0
    temperature: Positive = 1.0
    match_entropy: Text | None = None
    temperature_stages: Annotated[list[Positive], Field(min_length=1)] | None = field(
        default=None, hash=False
    )
    logits_noise: NonNegative = 0.0
    entropy_bonus: NonNegative = 0.0
    pass_at_k: PositiveInt | None = None
    loss_type: Literal["grpo", "dapo", "cispo", "dppo_tv", "dppo_kl"] = "grpo"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    delta: Positive | None = None
    use_rollout_logprobs: bool = False
    staleness: Count = 0

    @property
    def scheduled(self) -> bool:
        """Whether the arm has noise with a schedule, which begins after clean steps."""
        return self.noise or self.noise_target_kl is not None


_AT_RATIO_1 = ("grpo", "dapo")
"""Losses that still differ at a ratio of 1, because they are divided by different numbers."""

_OF_RATIO = ("importance_sampling_level", "epsilon", "epsilon_high", "delta")
"""Fields of a ratio and its bounds."""


def contradiction(arm: Arm, samples_per_prompt: int) -> str | None:
    """The contradiction between an arm's fields, as the predicate of a sentence; None if there is none.

    Args:
        arm: The arm.
        samples_per_prompt: Size of a group.
    """
    noisy = round(arm.noise_share * samples_per_prompt)
    if arm.tuning == "full":
        if not FORMATS[arm.weights].trains_in_full:
            return f"has tuning full, which cannot train packed {arm.weights} weights; set `weights: bf16`"
        if arm.lora_r != Arm.lora_r:
            return "has tuning full and lora_r, the rank of adapters; remove lora_r"
        if arm.noise:
            return "has tuning full, which gives each run its own norms, and noise in norms; remove the noise"
    if arm.learning_rate is not None and arm.learning_rates is not None:
        return "has both learning_rate, a single value, and learning_rates, a grid; choose one"
    if noisy == 0:
        return f"has a noise_share of {arm.noise_share}, which is 0 of {samples_per_prompt} samples; raise it"
    if arm.noise and arm.logits_noise:
        return "has noise in norms and in logits; choose one"
    if arm.noise_target_kl is not None and not (arm.noise or arm.logits_noise):
        return "has noise_target_kl, which needs `noise: true` or a logits_noise above 0"
    if arm.noise_sigma_stages is not None and arm.noise_target_kl is not None:
        return "has noise_sigma_stages, which fixes sigma, and noise_target_kl, which drives it; choose one"
    if arm.correction == "token_balance" and not (arm.noise and noisy < samples_per_prompt):
        return "has the correction token_balance, which needs `noise: true` and a noise_share below 1"
    if arm.match_entropy is not None and arm.temperature_stages is not None:
        return "has match_entropy, which controls the temperature, and temperature_stages; choose one"
    if arm.pass_at_k is not None and arm.pass_at_k > samples_per_prompt:
        return f"has pass_at_k {arm.pass_at_k}, more than the {samples_per_prompt} samples_per_prompt"
    if arm.use_rollout_logprobs and arm.correction != "none":
        return "has use_rollout_logprobs, whose ratio corrects for the sampler; set `correction: none`"
    if not arm.use_rollout_logprobs:
        if arm.loss_type not in _AT_RATIO_1:
            return f"has loss_type {arm.loss_type}, which bounds nothing without `use_rollout_logprobs: true`"
        for name in _OF_RATIO:
            if getattr(arm, name) != getattr(Arm, name):
                return f"has {name}, which does nothing without `use_rollout_logprobs: true`"
    return None


@dataclass(frozen=True)
class Run:
    """One run of a study: an arm with a seed and a learning rate."""

    arm: Arm
    seed: int
    learning_rate: float

    @property
    def name(self) -> str:
        """Name of the run and of its file, unique within a study."""
        return f"{self.arm.name}-lr{self.learning_rate!r}-s{self.seed}"
