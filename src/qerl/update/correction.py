"""Importance correction of a loss on samples of another policy, and what is logged of the two policies.

Samples come from the sampler mu (noisy, quantised, another kernel), gradients are of the trainer's policy pi.
A token's loss is multiplied by pi / mu of that token, bounded (`weights`). What that does not correct is said
in docs/numerics.md: the contexts in which tokens were drawn, and what came after them.

`Mismatch` measures how far the two are apart, as sums and maxima over the tokens of an optimizer step that
the update computed, whatever path they came by: old log-probabilities given or not, correction on or off.
Sums are added over processes; a mean of means would weigh few tokens like many. All travel in one message,
once a step.

Legend: B samples, C completion columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

_SUMS = (
    "tokens", "samples", "kl", "difference", "entropy", "entropy_excess", "ratios", "ratio", "ratio_squared",
    "truncated", "weight",
)  # fmt: skip
_MAXIMA = ("difference", "ratio", "weight", "minus_weight")


def importance_ratio(
    trainer_logps_BC: torch.Tensor, sampler_logps_BC: torch.Tensor, mask_BC: torch.Tensor, mode: str
) -> torch.Tensor:
    """pi / mu, unbounded: [B, C] of tokens for the token modes, [B, 1] of samples for the sequence modes.

    Args:
        trainer_logps_BC: Log-probabilities of the sampled tokens under the clean policy, without gradient.
        sampler_logps_BC: The same tokens under the policy that sampled them; NaN counts as no mismatch.
        mask_BC: 1 on tokens that count; elsewhere the ratio is 1.
        mode: `vllm_importance_sampling_mode` of the settings.
    """
    difference_BC = torch.nan_to_num((trainer_logps_BC - sampler_logps_BC) * mask_BC, nan=0.0)
    if mode.startswith("sequence"):
        difference_BC = difference_BC.sum(dim=-1, keepdim=True)
    return difference_BC.exp()


def weights(ratio: torch.Tensor, mode: str, low: float | None, high: float | None) -> torch.Tensor:
    """Factors of the loss: ratios within bounds. Truncation moves others to a bound, a mask mode drops them.

    Args:
        ratio, mode: As in `importance_ratio`.
        low, high: Bounds of the ratio, None for none.
    """
    if mode.endswith("mask"):
        return ratio.masked_fill(_outside(ratio, low, high), 0.0)
    if low is None and high is None:
        return ratio
    return ratio.clamp(min=low, max=high)


def _outside(ratio: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    return (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))


def sampler_trainer_kl(
    trainer_logps_BC: torch.Tensor, sampler_logps_BC: torch.Tensor, mask_BC: torch.Tensor
) -> torch.Tensor:
    """Estimates [B, C] of KL(mu || pi) in nats, one for each of the sampler's tokens.

    The estimator exp(d) - 1 - d with d = log pi - log mu is unbiased over the sampler's tokens and never
    negative (Schulman, "Approximating KL divergence", estimator k3).
    """
    d_BC = torch.nan_to_num((trainer_logps_BC - sampler_logps_BC) * mask_BC, nan=0.0)
    return (torch.expm1(d_BC) - d_BC) * mask_BC


@dataclass(frozen=True)
class Mismatch:
    """Sums and maxima over tokens, fp64, in the order of `_SUMS` and `_MAXIMA`."""

    sums: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def of(
        cls,
        trainer_logps_BC: torch.Tensor,
        sampler_logps_BC: torch.Tensor,
        entropy_BC: torch.Tensor,
        sampler_entropy_BC: torch.Tensor,
        mask_BC: torch.Tensor,
        ratio: torch.Tensor,
        weight: torch.Tensor,
        bounds: tuple[float | None, float | None],
    ) -> "Mismatch":
        """The sums of the tokens in the mask whose log-probability the sampler knows.

        Args:
            trainer_logps_BC, sampler_logps_BC: As in `importance_ratio`.
            entropy_BC, sampler_entropy_BC: Entropies of both policies at each token, in nats.
            mask_BC: 1 on tokens that count.
            ratio, weight: pi / mu, and what the loss is multiplied by; [B, C], or [B, 1] for samples.
            bounds: Bounds of the ratio.
        """
        known_BC = mask_BC.bool() & ~sampler_logps_BC.isnan()
        delta_BC = (trainer_logps_BC - sampler_logps_BC).abs()
        kl_BC = sampler_trainer_kl(trainer_logps_BC, sampler_logps_BC, known_BC)
        counted = known_BC if ratio.size(1) == mask_BC.size(1) else known_BC.any(dim=1, keepdim=True)
        sums = (
            (known_BC, known_BC),
            (known_BC.any(dim=1), known_BC.any(dim=1)),
            (kl_BC, known_BC),
            (delta_BC, known_BC),
            (entropy_BC, known_BC),
            (entropy_BC - sampler_entropy_BC, known_BC),
            (counted, counted),
            (ratio, counted),
            (ratio.double().square(), counted),
            (_outside(ratio, *bounds), counted),
            (weight, counted),
        )
        maxima = ((delta_BC, known_BC), (ratio, counted), (weight, counted), (-weight, counted))
        return cls(
            torch.stack([torch.where(mask, values.detach().double(), 0.0).sum() for values, mask in sums]),
            torch.stack(
                [torch.where(mask, values.detach().double(), -math.inf).amax() for values, mask in maxima]
            ),
        )

    def metrics(
        self, gather: Callable[[torch.Tensor], torch.Tensor], rollout_entropy: float
    ) -> dict[str, float]:
        """The metrics of all processes, each of which must call this; NaN where there is no token.

        Args:
            gather: From this process's [1, n] to [R, n] of all, as accelerate's.
            rollout_entropy: Mean entropy of the sampler over all tokens of the step's rollouts, computed or
                not.
        """
        gathered = gather(torch.cat([self.sums, self.maxima])[None]).split([len(_SUMS), len(_MAXIMA)], dim=1)
        total = dict(zip(_SUMS, gathered[0].sum(dim=0).tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, gathered[1].amax(dim=0).tolist(), strict=True))
        tokens, ratios = total["tokens"] or math.nan, total["ratios"] or math.nan
        maxima = {name: value if tokens == tokens else math.nan for name, value in maxima.items()}
        squares = total["ratio_squared"] or math.nan
        return {
            "entropy": rollout_entropy + total["entropy_excess"] / tokens,
            "entropy/computed": total["entropy"] / tokens,
            "sampling/kl": total["kl"] / tokens,
            "sampling/kl_sequence": total["kl"] / (total["samples"] or math.nan),
            "sampling/sampling_logp_difference/mean": total["difference"] / tokens,
            "sampling/sampling_logp_difference/max": maxima["difference"],
            "sampling/ratio/mean": total["ratio"] / ratios,
            "sampling/ratio/max": maxima["ratio"],
            "sampling/ratio/truncated": total["truncated"] / ratios,
            "sampling/ratio/effective_sample_size": total["ratio"] ** 2 / (ratios * squares),
            "sampling/importance_sampling_ratio/min": -maxima["minus_weight"],
            "sampling/importance_sampling_ratio/mean": total["weight"] / ratios,
            "sampling/importance_sampling_ratio/max": maxima["weight"],
        }


@dataclass(frozen=True)
class Correction:
    """TRL's settings of the importance correction, by their names without `vllm_importance_sampling_`.

    Attributes:
        correction: Whether the loss is corrected; the mismatch is measured in any case.
        mode: See :func:`importance_ratio`.
        clip_min, clip_max: Bounds of the ratio, None for no bound.
    """

    correction: bool
    mode: str
    clip_min: float | None
    clip_max: float | None

    def ratio(
        self, trainer_logps_BC: torch.Tensor, sampler_logps_BC: torch.Tensor, mask_BC: torch.Tensor
    ) -> torch.Tensor:
        """See :func:`importance_ratio`."""
        return importance_ratio(trainer_logps_BC, sampler_logps_BC, mask_BC, self.mode)

    def weight(self, ratio: torch.Tensor) -> torch.Tensor:
        """What the loss is multiplied by: the ratio within its bounds, or 1 without the correction."""
        if not self.correction:
            return torch.ones_like(ratio)
        return weights(ratio, self.mode, self.clip_min, self.clip_max)
