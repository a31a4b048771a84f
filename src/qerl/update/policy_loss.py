"""GRPO and its relatives: the loss of a microbatch of samples, and its metrics.

With r the importance ratio of the policy to the old policy (of a token, or the geometric mean over a sample)
and A the advantage of a sample, the loss of a token is

    l = term(r, A) keep w + beta KL + kl_tau (log r_mu)^2

where `term` depends on the loss's name (`clipped` and its neighbours), `keep` is 0 for samples and tokens
that an option leaves out, w is the importance correction, and r_mu the ratio to the sampler. The divisor of l
before the sum over tokens depends on the name, too (`_divisor`). The entropy bonus, if any, is subtracted.
Names and options are TRL's where it has them, else verl's or prime-rl's. With a teacher of weight d, the
first term is multiplied by 1 - d, and d times the divergence D of the policy from the teacher is added
(`qerl.update.distillation`), over all tokens that the loss sees.

Losses are pure functions of tensors. A loss leaves its metrics on the device and does not communicate with
other processes: each number read from the device waits for it, and each collective waits for the slowest
process. So a loss reports `Metric` objects, and `gathered` turns those of all losses of a step into numbers
with one collective.

Formulas of single tokens, shared with the server's losses (`qerl.update.losses`), are elementwise, in the
dtype of their arguments; a ratio per sequence broadcasts against log-probabilities per token. In them, p is
the policy's log-probability of a sampled token, q that of the policy in the ratio's denominator, r = exp(p -
q), A the advantage, and sg(x) is x without a gradient.

**Importance correction.** Samples come from the sampler mu (noisy, quantised, another kernel), gradients are
of the trainer's policy pi. A token's loss is multiplied by pi / mu of that token, bounded (`weights`). This
does not correct the contexts in which tokens were drawn, nor what came after them (docs/numerics.md).

If the loss's own ratio has the sampler in its denominator (`use_rollout_logprobs`), r contains pi / mu and w
is 1; mask modes still drop ratios beyond their bounds. Whole samples can be rejected with or without this
option (`Correction.kept`).

`mismatch` measures how far pi and mu are apart, as sums and extremes over the tokens of an optimizer step
that the update computed, in every configuration: with or without old log-probabilities, correction on or off.
Sums are added over processes, since a mean of means would give few tokens the weight of many. One collective
per step carries all of them.

Legend: B samples of a microbatch, C completion columns; R processes, n parts of a metric.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

_LEAST_LOG, _LARGEST_LOG = -18.420680743952367, 20.0  # bounds of log ratios in VESPO's weight; log 1e-8, 20


def clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    low: torch.Tensor | float,
    high: torch.Tensor | float,
    delta: float | None = None,
) -> torch.Tensor:
    """- min(r A, clip(r, low, high) A): no reward for a ratio beyond its bounds (PPO, arXiv 1707.06347).

    Args:
        ratio, advantages: r and A.
        low, high: Bounds of the ratio itself, 0.8 and 1.2 for example; DAPO's clip-higher sets them at
            unequal distances from 1 (arXiv 2503.14476).
        delta: Upper bound of r in the first term, which is otherwise unbounded where A is negative:
            two-sided clipping (INTELLECT-2, arXiv 2505.07291).
    """
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    bounds: Any = low, high
    return -torch.minimum(bounded * advantages, ratio.clamp(*bounds) * advantages)


def weighted(weight: torch.Tensor, logps: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """- sg(w) A p: REINFORCE with a weight (Williams 1992).

    With w = clip(r, low, high) it is CISPO: the clipped ratio weights the gradient, so every token keeps one
    (MiniMax-M1, arXiv 2506.13585; one-sided as in ScaleRL, arXiv 2510.13786). With w from `gamma_weight` it
    is VESPO.
    """
    return -weight.detach() * advantages * logps


def softly_gated(
    ratio: torch.Tensor, advantages: torch.Tensor, positive: float, negative: float
) -> torch.Tensor:
    """- 4 / t sigmoid(t (r - 1)) A: a smooth gate in place of a bound (SAPO, arXiv 2511.20347).

    Args:
        ratio, advantages: r and A.
        positive, negative: The temperature t where A is above 0, and elsewhere.
    """
    temperature = torch.where(advantages > 0, positive, negative)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


@torch.no_grad()
def gamma_weight(
    log_ratio_BC: torch.Tensor,
    correction_BC: torch.Tensor | None,
    advantages_B1: torch.Tensor,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> torch.Tensor:
    """e^l w^k e^(-l w) of each sample [B, 1], where w is the ratio of the whole sequence: 1 at w = 1, and
    towards 0 on both sides (VESPO, arXiv 2602.10693).

    Args:
        log_ratio_BC: p - q, 0 on tokens that do not count.
        correction_BC: The importance correction of each token, a factor of w; 1 on tokens that do not count.
        advantages_B1: A.
        positive, negative: (k, l) where A is not negative, and where it is.
    """
    log_w_B1 = log_ratio_BC.clamp(-20.0, 20.0).sum(-1, keepdim=True)
    if correction_BC is not None:
        log_w_B1 += correction_BC.log().clamp(_LEAST_LOG, _LARGEST_LOG).sum(-1, keepdim=True)
    log_w_B1 = log_w_B1.clamp(_LEAST_LOG, _LARGEST_LOG)
    k_B1, l_B1 = (torch.where(advantages_B1 >= 0, *pair) for pair in zip(positive, negative, strict=True))
    l_B1 = l_B1.clamp(min=1e-4)
    phi_B1 = (l_B1 + k_B1 * log_w_B1 - l_B1 * log_w_B1.exp()).exp()
    return phi_B1.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def binary_tv(logps: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """|pi - mu| of the sampled token: the total variation distance of the outcomes "this token or another
    one", a lower bound of the distance of the whole distributions (DPPO, arXiv 2602.04879, Binary-TV).

    Args:
        logps, old: p and q; probabilities are their exponentials.
    """
    return (logps.exp() - old.exp()).abs()


def binary_kl(logps: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) of the sampled token: KL(mu || pi) of "this token
    or another one", in nats (DPPO, arXiv 2602.04879, Binary-KL).

    Infinite where pi leaves no room for another token and mu does.
    """
    logps, old = logps.clamp(max=0.0), old.clamp(max=0.0)
    other, old_other = -torch.expm1(logps), -torch.expm1(old)
    rest = torch.where(old_other > 0, old_other * (old_other.log() - other.log()), 0.0)
    return old.exp() * (old - logps) + rest


DIVERGENCES = {"dppo_tv": binary_tv, "dppo_kl": binary_kl}


@torch.no_grad()
def beyond_divergence(
    name: str,
    logps: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return DPPO's mask (arXiv 2602.04879): the tokens whose probability has already moved beyond a
    threshold in the direction of their advantage. Tokens that move back are never masked.

    Args:
        name: "dppo_tv" or "dppo_kl".
        logps, old, advantages: p, q and A; q is the sampler's in the paper.
        low: Threshold of the divergence where A is below 0 and the probability has fallen.
        high: The same where A is above 0 and the probability has risen.

    Returns:
        The tokens beyond `low` and the tokens beyond `high`, bool.
    """
    divergence = DIVERGENCES[name](logps, old)
    below = (advantages < 0) & (logps < old) & (divergence > low)
    return below, (advantages > 0) & (logps > old) & (divergence > high)


def squared_log_ratio(logps: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """(log pi / mu)^2: a penalty that pulls each token towards the sampler (Kimi K2.5, arXiv 2602.02276;
    prime-rl's KL term), twice the estimator k2 of Schulman's "Approximating KL divergence". 0 where the
    sampler's log-probability is NaN, which stands for an unknown one.
    """
    return (logps - torch.where(sampler.isnan(), logps.detach(), sampler)).square()


def covariance(logps_BC: torch.Tensor, advantages_B: torch.Tensor, mask_BC: torch.Tensor) -> torch.Tensor:
    """(p - mean p) (A - mean A) of each token [B, C], means over the tokens of the mask: the token's part in
    the entropy that a policy gradient step removes (arXiv 2505.22617). Minus infinity outside of the mask.
    """
    mask_BC = mask_BC.bool()
    count = mask_BC.sum().clamp(min=1)
    advantages_BC = advantages_B[:, None].expand_as(logps_BC)
    centred = [
        x_BC - torch.where(mask_BC, x_BC, 0.0).sum() / count
        for x_BC in (logps_BC.masked_fill(~mask_BC, 0.0), advantages_BC)
    ]
    return (centred[0] * centred[1]).masked_fill(~mask_BC, -math.inf)


def largest_covariance(covariance_BC: torch.Tensor, count: int) -> torch.Tensor:
    """Return at most `count` tokens [B, C], bool, of the largest covariance: KL-Cov penalises them (arXiv
    2505.22617)."""
    chosen = torch.zeros_like(covariance_BC, dtype=torch.bool)
    values, places = covariance_BC.flatten().topk(min(count, covariance_BC.numel()))
    chosen.view(-1)[places] = values > -math.inf
    return chosen


def within_covariance(
    covariance_BC: torch.Tensor, low: float, high: float, count: int, uniform_BC: torch.Tensor
) -> torch.Tensor:
    """Return at most `count` tokens [B, C], bool, drawn from those whose covariance is between two bounds:
    Clip-Cov removes their gradient (arXiv 2505.22617).

    Args:
        covariance_BC: See `covariance`.
        low, high: The bounds, both excluded.
        count: Number of tokens.
        uniform_BC: A random number in [0, 1) for each token; the tokens with the largest are taken.
    """
    inside_BC = (covariance_BC > low) & (covariance_BC < high)
    return largest_covariance(torch.where(inside_BC, uniform_BC.to(covariance_BC), -math.inf), count)


def kl_to(reference: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """e^d - d - 1 with d = log-probability under the reference - p: an estimate of the KL divergence to the
    reference, never negative (estimator k3 of Schulman, "Approximating KL divergence"; GRPO, arXiv
    2402.03300).
    """
    d = reference - logps
    return d.exp() - d - 1


def importance_ratio(
    trainer_logps_BC: torch.Tensor, sampler_logps_BC: torch.Tensor, mask_BC: torch.Tensor, mode: str
) -> torch.Tensor:
    """Return pi / mu, unbounded: [B, C] per token in token modes, [B, 1] per sample in sequence modes.

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
    """Return factors of the loss. Truncation clamps ratios to the bounds, a mask mode sets those beyond to 0.

    Args:
        ratio, mode: As in `importance_ratio`.
        low, high: Bounds of the ratio, None for no bound.
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


def kept_samples(
    trainer_logps_BC: torch.Tensor,
    sampler_logps_BC: torch.Tensor,
    mask_BC: torch.Tensor,
    rule: str,
    threshold: float,
) -> torch.Tensor:
    """Return the samples [B, 1], bool, in which trainer and sampler are close enough, rejecting all others
    (rejection in verl's rollout correction, by its names; Trust Region Masking, arXiv 2512.23075).

    Args:
        trainer_logps_BC, sampler_logps_BC, mask_BC: As in `importance_ratio`.
        rule: "seq_mean_k1" keeps samples in which the geometric mean of the tokens' ratios is at most the
            threshold, and at least its reciprocal; "seq_mean_k3" those in which the mean over the tokens of
            `sampler_trainer_kl` is at most the threshold.
        threshold: A ratio above 1 for "seq_mean_k1"; nats per token for "seq_mean_k3".
    """
    if rule == "seq_mean_k1":
        difference_BC = torch.nan_to_num((trainer_logps_BC - sampler_logps_BC) * mask_BC, nan=0.0)
        return _mean_of_samples(difference_BC, mask_BC).abs() <= math.log(threshold)
    kl_BC = sampler_trainer_kl(trainer_logps_BC, sampler_logps_BC, mask_BC)
    return _mean_of_samples(kl_BC, mask_BC) <= threshold


@dataclass(frozen=True)
class Correction:
    """TRL's settings of the importance correction, by their names without `vllm_importance_sampling_`, and
    verl's of the rejection of whole samples.

    Attributes:
        correction: Whether the loss is corrected; the mismatch is measured in any case.
        mode: See :func:`importance_ratio`.
        clip_min, clip_max: Bounds of the ratio, None for no bound.
        in_ratio: Whether the loss's own ratio has the sampler in its denominator, so pi / mu is no factor.
        rollout_rs, rollout_rs_threshold: See `kept_samples`; None rejects nothing.
    """

    correction: bool
    mode: str
    clip_min: float | None
    clip_max: float | None
    in_ratio: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float = math.inf

    def ratio(
        self, trainer_logps_BC: torch.Tensor, sampler_logps_BC: torch.Tensor, mask_BC: torch.Tensor
    ) -> torch.Tensor:
        """See :func:`importance_ratio`."""
        return importance_ratio(trainer_logps_BC, sampler_logps_BC, mask_BC, self.mode)

    def weight(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return the factor of the loss: the ratio within its bounds, or 1 without the correction; with
        `in_ratio` it is 1, or 0 beyond the bounds of a mask mode."""
        if not self.correction or (self.in_ratio and not self.mode.endswith("mask")):
            return torch.ones_like(ratio)
        weight = weights(ratio, self.mode, self.clip_min, self.clip_max)
        return (weight != 0).to(weight) if self.in_ratio else weight

    def kept(
        self, trainer_logps_BC: torch.Tensor, sampler_logps_BC: torch.Tensor, mask_BC: torch.Tensor
    ) -> torch.Tensor | None:
        """See `kept_samples`; None if samples are not rejected."""
        if self.rollout_rs is None:
            return None
        return kept_samples(
            *(trainer_logps_BC, sampler_logps_BC, mask_BC), self.rollout_rs, self.rollout_rs_threshold
        )


_OF_STEP = ("dapo", "cispo", "vespo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "token-mean")
"""Losses that are logged as the microbatch's part of the step's loss; others as if it were a whole step."""


@dataclass(frozen=True)
class Metric:
    """One process's part of a number that is logged for a step.

    Attributes:
        parts: Float64 on the device: [2], sum and count, for a mean; else [1], a sum or an extreme. Without
            values an extreme is the infinity that any value replaces.
        kind: How the parts of all processes are combined.
        of_nothing: The mean where no process counts a value.
    """

    parts: torch.Tensor
    kind: Literal["mean", "sum", "least", "largest"]
    of_nothing: float = 0.0

    @classmethod
    def mean(cls, values: torch.Tensor, counted: torch.Tensor, of_nothing: float = 0.0) -> "Metric":
        """The mean of the counted values; `counted` is 0 or 1 in the shape of the values."""
        total = torch.where(counted.bool(), values, 0.0).sum()
        return cls(torch.stack([total.detach().double(), counted.sum().double()]), "mean", of_nothing)

    @classmethod
    def sum(cls, values: torch.Tensor) -> "Metric":
        """The sum of values."""
        return cls(values.detach().sum().double()[None], "sum")

    @classmethod
    def least(cls, values: torch.Tensor, counted: torch.Tensor) -> "Metric":
        """The least of the counted values, NaN if one of them is NaN."""
        return cls(values.detach().where(counted.bool(), math.inf).amin().double()[None], "least")

    @classmethod
    def largest(cls, values: torch.Tensor, counted: torch.Tensor) -> "Metric":
        """The largest of the counted values, NaN if one of them is NaN."""
        return cls(values.detach().where(counted.bool(), -math.inf).amax().double()[None], "largest")

    def value(self, parts_Rn: torch.Tensor) -> float:
        """Return the number from the parts of all processes, on the CPU; NaN for an extreme of no values."""
        if self.kind == "mean":
            total, count = parts_Rn.sum(dim=0).tolist()
            return total / count if count else self.of_nothing
        if self.kind == "sum":
            return parts_Rn.sum().item()
        extreme, of_nothing = (
            (parts_Rn.amin(), math.inf) if self.kind == "least" else (parts_Rn.amax(), -math.inf)
        )
        return math.nan if extreme.item() == of_nothing else extreme.item()


Metrics = Mapping[str, Metric]
"""Metrics of a loss, by name."""


def mismatch(
    trainer_logps_BC: torch.Tensor,
    sampler_logps_BC: torch.Tensor,
    entropy_BC: torch.Tensor,
    sampler_entropy_BC: torch.Tensor,
    mask_BC: torch.Tensor,
    ratio: torch.Tensor,
    weight: torch.Tensor,
    bounds: tuple[float | None, float | None],
) -> Metrics:
    """Measure how far trainer and sampler are apart, on tokens of the mask whose log-probability under the
    sampler is known; NaN without such tokens. `mismatch_metrics` prepares the result for logging.

    Args:
        trainer_logps_BC, sampler_logps_BC: As in `importance_ratio`.
        entropy_BC, sampler_entropy_BC: Entropies of both policies at each token, in nats.
        mask_BC: 1 on tokens that count.
        ratio, weight: pi / mu, and the factor of the loss; [B, C], or [B, 1] for samples.
        bounds: Bounds of the ratio.
    """
    known_BC = mask_BC.bool() & ~sampler_logps_BC.isnan()
    counted = known_BC if ratio.size(1) == mask_BC.size(1) else known_BC.any(dim=1, keepdim=True)
    delta_BC = (trainer_logps_BC - sampler_logps_BC).abs()
    kl_BC = sampler_trainer_kl(trainer_logps_BC, sampler_logps_BC, known_BC)
    means = {
        "entropy/computed": (entropy_BC, known_BC),
        "entropy/excess": (entropy_BC - sampler_entropy_BC, known_BC),
        "sampling/kl": (kl_BC, known_BC),
        "sampling/kl_sequence": (kl_BC.double().sum(dim=1), known_BC.any(dim=1)),
        "sampling/sampling_logp_difference/mean": (delta_BC, known_BC),
        "sampling/ratio/mean": (ratio, counted),
        "sampling/ratio/square": (ratio.double().square(), counted),
        "sampling/ratio/truncated": (_outside(ratio, *bounds), counted),
        "sampling/importance_sampling_ratio/mean": (weight, counted),
    }
    found = {name: Metric.mean(part.double(), mask, torch.nan) for name, (part, mask) in means.items()}
    return found | {
        "sampling/sampling_logp_difference/max": Metric.largest(delta_BC, known_BC),
        "sampling/ratio/max": Metric.largest(ratio, counted),
        "sampling/importance_sampling_ratio/min": Metric.least(weight, counted),
        "sampling/importance_sampling_ratio/max": Metric.largest(weight, counted),
    }


def mismatch_metrics(found: Mapping[str, list[float]], rollout_entropy: float) -> dict[str, list[float]]:
    """Prepare the numbers of `mismatch` for logging: replace "entropy/excess" and "sampling/ratio/square" by
    the entropy and the effective sample size.

    Args:
        found: Result of `gathered`.
        rollout_entropy: Mean entropy of the sampler over all tokens of the step's rollouts, computed or not;
            NaN where the sampler gave none: then the entropy of the computed tokens is logged.
    """
    logged = dict(found)
    (excess,), (square,) = logged.pop("entropy/excess"), logged.pop("sampling/ratio/square")
    (computed,), (ratio,) = logged["entropy/computed"], logged["sampling/ratio/mean"]
    logged["entropy"] = [computed if math.isnan(rollout_entropy) else rollout_entropy + excess]
    logged["sampling/ratio/effective_sample_size"] = [ratio**2 / (square or math.nan)]
    return logged


def gathered(
    losses: Sequence[Metrics], gather: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, list[float]]:
    """Return the metrics of some losses by name, with one number for each loss that reports the metric.

    Args:
        losses: Metrics of this process's losses; other processes have as many, with the same names.
        gather: Maps this process's [1, n] to the [R, n] of all processes, as accelerate's does.
    """
    reported = [(name, metric) for loss in losses for name, metric in loss.items()]
    found = defaultdict[str, list[float]](list)
    if reported:
        own = torch.cat([metric.parts for _, metric in reported])
        sizes = [len(metric.parts) for _, metric in reported]
        parts_R = gather(own[None]).cpu().split(sizes, dim=1)
        for (name, metric), parts_Rn in zip(reported, parts_R, strict=True):
            found[name].append(metric.value(parts_Rn))
    return found


@dataclass(frozen=True)
class Tokens:
    """Inputs of a loss at the sampled tokens.

    Attributes:
        mask_BC: 1 on tokens that the policy wrote and the loss sees. Elsewhere the tensors below may hold
            anything, without effect.
        advantages_B: Advantages of the samples.
        logps_BC: Log-probabilities under the policy, with its gradient.
        entropy_BC: Entropies of its distributions in nats.
        old_BC: Log-probabilities under the old policy, the ratio's denominator; None for the current policy.
        sampler_BC: Log-probabilities under the sampler, NaN where unknown; None for the old policy.
        reference_BC: Log-probabilities under the reference policy; None where `beta` is 0.
        correction: w, [B, C] with 1 outside of the mask, or [B, 1]; None is 1.
        high_entropy_BC: Tokens that `high_entropy` keeps; None keeps all.
        kept_B1: Samples that `Correction.kept` keeps, bool; None keeps all.
        chosen_BC: Tokens whose gradient "clip_cov" removes, or that "kl_cov" penalises, bool; None for none.
        group_tokens_B: Mean number of tokens that the loss sees per sample of the same prompt; read by
            "prompt-mean" alone.
        divergence_BC: Divergence of the policy's distributions from a teacher's, with its gradient; None
            without a teacher.
    """

    mask_BC: torch.Tensor
    advantages_B: torch.Tensor
    logps_BC: torch.Tensor
    entropy_BC: torch.Tensor
    old_BC: torch.Tensor | None = None
    sampler_BC: torch.Tensor | None = None
    reference_BC: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    high_entropy_BC: torch.Tensor | None = None
    kept_B1: torch.Tensor | None = None
    chosen_BC: torch.Tensor | None = None
    group_tokens_B: torch.Tensor | None = None
    divergence_BC: torch.Tensor | None = None

    def masked(self) -> "Tokens":
        """Return a copy with 0 outside of the mask: an overflow there would be infinite, and times 0 NaN."""
        outside_BC = ~self.mask_BC.bool()
        names = ("logps_BC", "entropy_BC", "old_BC", "sampler_BC", "reference_BC", "divergence_BC")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{n: x.masked_fill(outside_BC, 0.0) for n, x in given.items() if x is not None})


@dataclass(frozen=True)
class Share:
    """A microbatch's share of an optimizer step.

    Attributes:
        microbatches: Number of microbatches of the step.
        tokens: Number of the step's tokens that count, divided by the number of processes.
        counted: Share of the step's samples that count: 1, or the share of groups with a signal
            (`filter_zero_advantages`).
    """

    microbatches: int
    tokens: float
    counted: float = 1.0


@dataclass(frozen=True)
class PolicyLoss:
    """A loss by name, and its options.

    Attributes:
        name: TRL's `loss_type`: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo"; or
            verl's "dppo_tv", "dppo_kl", "clip_cov" or "kl_cov".
        of_sequence: Whether the ratio is per sample, the geometric mean of its token ratios (GSPO, arXiv
            2507.18071).
        epsilon_low, epsilon_high: Bounds of the ratio are 1 - epsilon_low and 1 + epsilon_high; for "cispo"
            `epsilon_high` is the upper bound itself, and there is no lower one; for "dppo_tv" and "dppo_kl"
            both are thresholds of the divergence (`beyond_divergence`).
        delta: See `qerl.update.policy_loss.clipped`; for "dppo_tv" and "dppo_kl" the upper bound of the
            ratio that weights a gradient.
        beta: Weight of the KL divergence to the reference.
        kl_times_ratio: Whether each token's KL divergence is multiplied by r, with a gradient through r
            (DeepSeek-V3.2, arXiv 2512.02556).
        off_policy_threshold: Samples of negative advantage are left out if they are less likely under the
            policy than under the sampler by more than this, in nats per token on average; None keeps all
            (DeepSeek-V3.2, equation 9).
        sapo: Temperatures of "sapo" for positive and other advantages.
        vespo_positive, vespo_negative: (k, lambda) of "vespo" for advantages that are not negative, and the
            others.
        longest: Largest number of completion tokens that the run allows, the divisor of "dr_grpo".
        entropy_bonus: Whether an entropy bonus may be subtracted.
        aggregation: verl's `loss_agg_mode`, see `_divisor`; None takes the aggregation of the loss's name.
        kl_tau: Weight of `squared_log_ratio` in samples whose advantage is not 0 (prime-rl leaves out the
            others).
        kl_cov_coef: Weight of |log r| on the tokens that "kl_cov" penalises.
        distillation_weight: Weight d of a teacher in the loss of a token; at 1 advantages have no effect.
    """

    name: str
    of_sequence: bool = False
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    kl_times_ratio: bool = True
    off_policy_threshold: float | None = None
    sapo: tuple[float, float] = (1.0, 1.05)
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    longest: int = 1
    entropy_bonus: bool = False
    aggregation: str | None = None
    kl_tau: float = 0.0
    kl_cov_coef: float = 1.0
    distillation_weight: float = 0.0

    @property
    def reads_logps(self) -> bool:
        """True if the loss has a gradient with respect to log-probabilities."""
        return self.distillation_weight < 1.0 or self.beta != 0.0 or self.kl_tau != 0.0

    def __call__(
        self, tokens: Tokens, share: Share, entropy_coef: float = 0.0
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the loss of a microbatch, a scalar; the sum over a step's microbatches is the step's loss.

        Args:
            tokens: Inputs at the microbatch's tokens.
            share: Its share of the step.
            entropy_coef: Weight of the entropy bonus, which is the mean entropy of the tokens that the loss
                keeps.

        Returns:
            The loss, and its metrics under TRL's names. With an entropy bonus also the sums
            "entropy_bonus/nats" and "entropy_bonus/tokens", which control the adaptive bonus.
        """
        t, mask_BC = tokens.masked(), tokens.mask_BC
        advantages_B1 = t.advantages_B[:, None]
        old_BC = t.logps_BC.detach() if t.old_BC is None else t.old_BC
        log_ratio = log_ratio_BC = t.logps_BC - old_BC
        if self.of_sequence:
            log_ratio = _mean_of_samples(log_ratio_BC, mask_BC)
        ratio = log_ratio.exp()
        metrics: dict[str, Metric] = {}

        if self.distillation_weight == 1.0:
            loss = torch.zeros_like(t.logps_BC)
        else:
            loss = self._terms(t, ratio, log_ratio_BC, metrics)
        if self.off_policy_threshold is not None:
            sampler_BC = old_BC if t.sampler_BC is None else t.sampler_BC
            gap_BC = (sampler_BC - t.logps_BC.detach()).nan_to_num(nan=0.0)
            near_B1 = _mean_of_samples(gap_BC, mask_BC) <= self.off_policy_threshold
            loss = loss * ((advantages_B1 >= 0) | near_B1)
        if t.high_entropy_BC is not None:
            loss = loss * t.high_entropy_BC
        if t.correction is not None and self.name != "vespo":  # VESPO's weight contains it already
            loss = loss * t.correction
        if t.kept_B1 is not None:
            loss = loss * t.kept_B1
            pulls_B1 = (advantages_B1 != 0) & mask_BC.any(dim=-1, keepdim=True)
            metrics["rollout_rs/rejected"] = Metric.mean((~t.kept_B1).float(), pulls_B1)
        if self.distillation_weight:
            assert t.divergence_BC is not None
            weight = self.distillation_weight
            distilled = weight * t.divergence_BC
            loss = distilled if weight == 1.0 else distilled + (1 - weight) * loss
            metrics["distillation/divergence"] = Metric.mean(t.divergence_BC, mask_BC)
        if self.beta:
            assert t.reference_BC is not None
            kl_BC = kl_to(t.reference_BC, t.logps_BC)
            if self.kl_times_ratio:
                kl_BC = kl_BC * ratio
            loss = loss + self.beta * kl_BC
            metrics["kl"] = Metric.mean(kl_BC, mask_BC)
        if self.kl_tau:
            assert t.sampler_BC is not None
            pull_BC = squared_log_ratio(t.logps_BC, t.sampler_BC)
            loss = loss + self.kl_tau * pull_BC * (advantages_B1 != 0)
            metrics["sampling/squared_log_ratio"] = Metric.mean(pull_BC, mask_BC * (advantages_B1 != 0))
        aggregation = self.aggregation or self.name
        total = (loss * mask_BC / _divisor(aggregation, t, share, self.longest)).sum()

        if self.entropy_bonus:
            kept_BC = mask_BC if t.high_entropy_BC is None else mask_BC * t.high_entropy_BC
            nats, count = (t.entropy_BC * kept_BC).sum(), kept_BC.sum()
            policy = total.detach() * (1 if aggregation in _OF_STEP else share.microbatches)
            metrics["policy_loss"] = Metric.mean(policy, ~policy.isnan(), of_nothing=torch.nan)
            metrics |= {"entropy_bonus/nats": Metric.sum(nats), "entropy_bonus/tokens": Metric.sum(count)}
            total = total - entropy_coef * nats / count.clamp(min=1.0) / share.microbatches
        return total, metrics

    def _terms(
        self, t: Tokens, ratio: torch.Tensor, log_ratio_BC: torch.Tensor, metrics: dict[str, Metric]
    ) -> torch.Tensor:
        """Return the policy's part of each token's loss, [B, C] or [B, 1]; adds its metrics to `metrics`."""
        advantages_B1 = t.advantages_B[:, None]
        if self.name == "cispo":
            is_clipped = (ratio > self.epsilon_high) & (advantages_B1 > 0)
            metrics["cispo_clip_ratio"] = _mean_of(is_clipped, t.mask_BC)
            return weighted(ratio.clamp(max=self.epsilon_high), t.logps_BC, advantages_B1)
        if self.name == "sapo":
            return softly_gated(ratio, advantages_B1, *self.sapo)
        if self.name == "vespo":
            phi_B1 = gamma_weight(
                *(log_ratio_BC, t.correction, advantages_B1),
                *(self.vespo_positive, self.vespo_negative),
            )
            pulls_B1 = (advantages_B1 != 0) & t.mask_BC.any(dim=-1, keepdim=True)
            metrics["vespo/phi_seq_mean"] = Metric.mean(phi_B1, pulls_B1, of_nothing=torch.nan)
            return weighted(phi_B1, t.logps_BC, advantages_B1)
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        if self.name in DIVERGENCES:
            old_BC = t.logps_BC.detach() if t.old_BC is None else t.old_BC
            below, above = beyond_divergence(
                *(self.name, t.logps_BC, old_BC, advantages_B1), self.epsilon_low, self.epsilon_high
            )
            metrics |= _clip_metrics(below, above, t.mask_BC)
            return weighted(bounded.masked_fill(below | above, 0.0), t.logps_BC, advantages_B1)
        if self.name == "kl_cov":
            loss = -ratio * advantages_B1
            return loss if t.chosen_BC is None else loss + self.kl_cov_coef * log_ratio_BC.abs() * t.chosen_BC
        below, above = (bounded < low) & (advantages_B1 < 0), (bounded > high) & (advantages_B1 > 0)
        metrics |= _clip_metrics(below, above, t.mask_BC)
        loss = clipped(ratio, advantages_B1, low, high, self.delta)
        return loss if self.name != "clip_cov" or t.chosen_BC is None else loss * ~t.chosen_BC


def high_entropy(entropy_BC: torch.Tensor, mask_BC: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return the tokens [B, C] of the mask whose entropy is at least the threshold, a scalar: only these
    carry the gradient in "Beyond the 80/20 Rule" (arXiv 2506.01939)."""
    return (entropy_BC >= threshold) & mask_BC.bool()


def adapted_entropy_coef(
    coef: float, entropy: float, target: float, step: float, least: float, most: float
) -> float:
    """The weight of the adaptive entropy bonus after an optimizer step: larger if the entropy was no higher
    than its target, else smaller (Skywork-OR1, arXiv 2505.22312). The bonus is applied in the next step only
    if this step's entropy is no higher than the target.
    """
    return min(coef + step, most) if entropy <= target else max(coef - step, least)


def _divisor(name: str, t: Tokens, share: Share, longest: int) -> torch.Tensor | float:
    """Return the divisor of each token's loss before the sum: a scalar, or [B, 1] per sample.

    With n the tokens of a sample, N those of the microbatch, S those of the step in all microbatches and
    processes, and g the mean of n over the samples of a prompt, for a step of one microbatch:

    - "grpo", "seq-mean-token-mean": B n, so that samples count alike (GRPO, arXiv 2402.03300); "sapo" too
      (arXiv 2511.20347).
    - "bnpo": N, so that tokens of a microbatch count alike.
    - "dr_grpo", "seq-mean-token-sum-norm": B longest, the same in every microbatch (Dr. GRPO, arXiv
      2503.20783).
    - "luspo", "seq-mean-token-sum": B, so that a sample counts in proportion to its tokens (LUSPO, arXiv
      2602.05261).
    - "prompt-mean": B g, so that prompts count alike, and tokens within a prompt (ScaleRL, arXiv 2510.13786).
    - all others, "token-mean": S, so that tokens of a step count alike (DAPO, arXiv 2503.14476).

    Names with dashes are values of verl's `loss_agg_mode`, except "prompt-mean", which verl does not have.
    Where groups without signal do not count, B and S count the other groups only.
    """
    times = share.microbatches
    samples = len(t.mask_BC) * share.counted
    match name:
        case "grpo" | "sapo" | "seq-mean-token-mean":
            return samples * t.mask_BC.sum(-1, keepdim=True).clamp(min=1.0) * times
        case "bnpo":
            return t.mask_BC.sum().clamp(min=1.0) * times
        case "dr_grpo" | "seq-mean-token-sum-norm":
            return samples * longest * times
        case "luspo" | "seq-mean-token-sum":
            return samples * times
        case "prompt-mean":
            assert t.group_tokens_B is not None
            tokens_B1 = t.group_tokens_B[:, None]
            return samples * torch.where(tokens_B1 > 0, tokens_B1, 1.0) * times
        case _:
            return share.tokens


# Metrics


def _mean_of_samples(values_BC: torch.Tensor, mask_BC: torch.Tensor) -> torch.Tensor:
    """The mean [B, 1] over the tokens of each sample, 0 for a sample without any."""
    return (values_BC * mask_BC).sum(-1, keepdim=True) / mask_BC.sum(-1, keepdim=True).clamp(min=1.0)


def _mean_of(chosen: torch.Tensor, mask_BC: torch.Tensor) -> Metric:
    """The share of tokens [B, C] that are chosen, or of samples [B, 1]."""
    counted = mask_BC if chosen.size(1) == mask_BC.size(1) else torch.ones_like(chosen)
    return Metric.mean(chosen.float(), counted)


def _clip_metrics(below: torch.Tensor, above: torch.Tensor, mask_BC: torch.Tensor) -> dict[str, Metric]:
    """Return the share of tokens [B, C], or of samples [B, 1], whose gradient a lower or an upper bound
    removes; also the least share per sample for the lower bound, and the largest for the upper one."""
    of_samples = below.size(1) == 1
    counted_B = torch.ones_like(below[:, 0]) if of_samples else mask_BC.any(dim=-1)
    shares = [
        x[:, 0].float() if of_samples else (x * mask_BC).sum(-1) / mask_BC.sum(-1) for x in (below, above)
    ]
    return {
        "clip_ratio/low_mean": _mean_of(below, mask_BC),
        "clip_ratio/high_mean": _mean_of(above, mask_BC),
        "clip_ratio/region_mean": _mean_of(below | above, mask_BC),
        "clip_ratio/low_min": Metric.least(shares[0], counted_B),
        "clip_ratio/high_max": Metric.largest(shares[1], counted_B),
    }
