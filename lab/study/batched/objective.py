"""The losses of a step, and metrics of sampler and policy.

Legend: S runs (s of a piece), R samples of a run, C tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import cast

import torch

from lab.study.arms import Arm, Run
from lab.study.batched.corrections import balance_ratio, one_sided
from lab.study.batched.sampler import Samples
from lab.study.batched.score import Piece, Texts
from qerl.kernels.tensors import upload
from qerl.update.policy_loss import (
    PolicyLoss,
    Share,
    Tokens,
    importance_ratio,
    sampler_trainer_kl,
    weights,
)

BOUNDED = ("token_truncate", "token_one_sided")
"""Corrections whose factor is the ratio within bounds."""

HELD = ("clip_ratio/region_mean", "cispo_clip_ratio")
"""Metrics in which losses report the tokens, or samples, whose ratio is beyond a bound."""


@dataclass
class Outcome:
    """Inputs of a step's loss, and the results that the update fills in piece by piece.

    Attributes:
        runs: The runs.
        advantages_SR: fp32.
        mask_SRC, sampler_SRC, sampler_entropies_SRC: Tokens that count, and their log-probabilities and
            entropies under the policy that drew them.
        tokens_S: Number of tokens that count.
        noisy_R: Which samples were drawn with noise.
        share: Share of the samples that were drawn with noise.
        noisy_SRC: Log-probabilities of all samples under the noisy policy, where the correction needs them.
        logps_SRC, entropies_SRC: Log-probabilities and entropies under the policy.
        ratio_SRC, weights_SRC: pi / mu, and the factors of the loss.
        loss_S: Loss of each run.
        held_S2: Number of tokens whose ratio is beyond a bound of the loss, and number of tokens; of samples
            if the ratio is one per sample.
    """

    runs: Sequence[Run]
    advantages_SR: torch.Tensor
    mask_SRC: torch.Tensor
    sampler_SRC: torch.Tensor
    sampler_entropies_SRC: torch.Tensor
    tokens_S: list[int]
    noisy_R: torch.Tensor
    share: float
    noisy_SRC: torch.Tensor | None = None
    logps_SRC: torch.Tensor = field(init=False)
    entropies_SRC: torch.Tensor = field(init=False)
    ratio_SRC: torch.Tensor = field(init=False)
    weights_SRC: torch.Tensor = field(init=False)
    loss_S: torch.Tensor = field(init=False)
    held_S2: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name in ("logps_SRC", "entropies_SRC", "ratio_SRC", "weights_SRC"):
            setattr(self, name, torch.zeros_like(self.sampler_SRC))
        self.loss_S = torch.zeros_like(self.sampler_SRC[:, 0, 0])
        self.held_S2 = self.loss_S.new_zeros(len(self.loss_S), 2)

    @classmethod
    def of(
        cls,
        runs: Sequence[Run],
        samples: Samples,
        texts: Texts,
        advantages_SR: torch.Tensor,
        noisy_R: Sequence[bool],
        share: float,
    ) -> "Outcome":
        """The inputs, before the update; tensors are cut to the longest completion."""
        columns, device = texts.mask_SRC.shape[2], texts.mask_SRC.device
        return cls(
            runs,
            advantages_SR.to(device),
            texts.mask_SRC,
            samples.logprobs_SRC[..., :columns],
            samples.entropies_SRC[..., :columns],
            texts.counts_SRC.sum(dim=(1, 2)).tolist(),
            torch.tensor(list(noisy_R), device=device),
            share,
        )

    def columns(self) -> dict[str, torch.Tensor]:
        """Logged metrics of each run's tokens, [S] each."""
        mask = self.mask_SRC
        noisy = mask & self.noisy_R[:, None]
        kl_SRC = sampler_trainer_kl(self.logps_SRC, self.sampler_SRC, mask)
        bounded_S = torch.tensor([run.arm.correction in BOUNDED for run in self.runs], device=mask.device)
        moved = (self.weights_SRC - self.ratio_SRC).abs() > 1e-3 * self.ratio_SRC
        total = _sum(self.ratio_SRC, mask)
        return {
            "loss": self.loss_S,
            "entropy": _mean(self.entropies_SRC, mask),
            "rollout/entropy": _mean(self.sampler_entropies_SRC, mask),
            "sampling/kl": _mean(kl_SRC, noisy),
            "sampling/ratio/mean": _mean(self.ratio_SRC, mask),
            "sampling/ratio/truncated": _mean(moved & bounded_S[:, None, None], mask),
            "sampling/ratio/effective_sample_size": total**2
            / (_sum(mask, mask) * _sum(self.ratio_SRC.double().square(), mask)),
            "sampling/importance_sampling_ratio/mean": _mean(self.weights_SRC, mask),
            "clip_ratio": self.held_S2[:, 0] / self.held_S2[:, 1].clamp(min=1),
            "completions/mean_length": mask.sum(dim=2).double().mean(dim=1),
        }


def loss_of(
    outcome: Outcome, piece: Piece, logps_sRC: torch.Tensor, entropies_sRC: torch.Tensor
) -> torch.Tensor:
    """The part [s] of the runs' losses that comes from the samples of a piece; parts add up over pieces.

    Args:
        outcome: Receives the computed values.
        logps_sRC, entropies_sRC: Log-probabilities and entropies under the policy, with gradient.
    """
    at = piece.runs, piece.samples
    mask = outcome.mask_SRC[at]
    _weigh(outcome, piece, logps_sRC.detach())
    part = mask.shape[1] / outcome.mask_SRC.shape[1]
    # A piece has a share of a run's samples. Its loss is that of a step of these samples alone, times the
    # share; so losses that divide by a step's tokens divide by those of the whole step.
    tokens_s = upload(torch.tensor([max(1, n) * part for n in outcome.tokens_S[piece.runs]]), mask.device)
    seen = (
        mask, outcome.advantages_SR[at], outcome.sampler_SRC[at], outcome.weights_SRC[at], tokens_s,
        logps_sRC, entropies_sRC,
    )  # fmt: skip
    losses, held = [], []
    for arm, own in _by_arm(outcome.runs[piece.runs]):
        loss, beyond = torch.vmap(partial(_policy_loss, arm))(*(x[own] for x in seen))
        losses.append(loss * part)
        held.append(beyond)
    loss_s = torch.cat(losses)
    outcome.held_S2[piece.runs] += torch.cat(held)
    bonuses = [run.arm.entropy_bonus for run in outcome.runs[piece.runs]]
    if any(bonuses):
        tokens_s = outcome.mask_SRC[piece.runs].sum(dim=(1, 2)).clamp(min=1)
        bonus_s = (entropies_sRC * mask).sum(dim=(1, 2)) / tokens_s
        loss_s = loss_s - bonus_s * torch.tensor(bonuses, device=loss_s.device)
    outcome.loss_S[piece.runs] += loss_s.detach()
    outcome.logps_SRC[at], outcome.entropies_SRC[at] = logps_sRC.detach(), entropies_sRC.detach()
    return loss_s


def _policy_loss(
    arm: Arm,
    mask_RC: torch.Tensor,
    advantages_R: torch.Tensor,
    sampler_RC: torch.Tensor,
    weights_RC: torch.Tensor,
    tokens: torch.Tensor,
    logps_RC: torch.Tensor,
    entropies_RC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a run, a scalar without the bonus, and its row [2] of `Outcome.held_S2`."""
    loss = PolicyLoss(
        arm.loss_type,
        of_sequence=arm.importance_sampling_level == "sequence",
        epsilon_low=arm.epsilon,
        epsilon_high=arm.epsilon if arm.epsilon_high is None else arm.epsilon_high,
        delta=arm.delta,
    )
    seen = Tokens(
        mask_RC,
        advantages_R,
        logps_RC,
        entropies_RC,
        old_BC=sampler_RC if arm.use_rollout_logprobs else None,
        correction=weights_RC,
    )
    value, metrics = loss(seen, Share(1, cast(float, tokens)))
    held = [metrics[name].parts for name in HELD if name in metrics]
    return value, held[0] if held else torch.zeros_like(tokens).double().expand(2)


def _weigh(outcome: Outcome, piece: Piece, logps_sRC: torch.Tensor) -> None:
    """Fill in the ratios of a piece, and the factors of the loss by each run's correction."""
    at = piece.runs, piece.samples
    mask, sampler = outcome.mask_SRC[at], outcome.sampler_SRC[at]
    flat = logps_sRC.flatten(0, 1), sampler.flatten(0, 1), mask.flatten(0, 1)
    ratio_sRC = importance_ratio(*flat, "token_truncate").view_as(logps_sRC)
    noisy = None if outcome.noisy_SRC is None else outcome.noisy_SRC[at]
    advantages_sR1 = outcome.advantages_SR[at][..., None]
    each = [
        _weights(
            arm,
            ratio_sRC[own],
            logps_sRC[own],
            mask[own],
            advantages_sR1[own],
            outcome.share,
            None if noisy is None else noisy[own],
        )
        for arm, own in _by_arm(outcome.runs[piece.runs])
    ]
    outcome.ratio_SRC[at], outcome.weights_SRC[at] = ratio_sRC, torch.cat(each)


def _by_arm(runs: Sequence[Run]) -> Iterator[tuple[Arm, slice]]:
    """Yield each group of adjacent runs of one arm: the arm and the group's slice."""
    for arm, same in groupby(range(len(runs)), key=lambda index: runs[index].arm):
        indices = list(same)
        yield arm, slice(indices[0], indices[-1] + 1)


def _weights(
    arm: Arm,
    ratio_sRC: torch.Tensor,
    logps_sRC: torch.Tensor,
    mask_sRC: torch.Tensor,
    advantages_sR1: torch.Tensor,
    share: float,
    noisy_sRC: torch.Tensor | None,
) -> torch.Tensor:
    """Factors of the loss for the samples of some runs of an arm."""
    if arm.correction == "none":
        return torch.ones_like(ratio_sRC)
    if arm.correction == "token_balance":
        # Without noise in this step, the mixture is the policy.
        return (
            torch.ones_like(ratio_sRC)
            if noisy_sRC is None
            else balance_ratio(logps_sRC, noisy_sRC, share, mask_sRC)
        )
    if arm.correction == "token_one_sided":
        return one_sided(ratio_sRC, advantages_sR1, arm.correction_max)
    return weights(ratio_sRC, arm.correction, None, arm.correction_max)


def _sum(values_SRC: torch.Tensor, mask_SRC: torch.Tensor) -> torch.Tensor:
    return (values_SRC.double() * mask_SRC).sum(dim=(1, 2))


def _mean(values_SRC: torch.Tensor, mask_SRC: torch.Tensor) -> torch.Tensor:
    return _sum(values_SRC, mask_SRC) / mask_SRC.sum(dim=(1, 2))
