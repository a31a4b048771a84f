"""Corrections of the loss for studies only, beside those of `qerl.update.policy_loss`.

Legend: R samples, C completion columns.
"""

import torch


def one_sided(ratio_RC: torch.Tensor, advantages_R1: torch.Tensor, most: float) -> torch.Tensor:
    """The ratio pi / mu [R, C], bounded from below by 1 for good samples and from above by 1 for bad ones.

    A token of a good sample (advantage above 0) counts at least as often as it was drawn, 1 to `most`: a
    success that is rare under the trainer is learned at the rate at which the sampler found it. A token of a
    bad sample counts at most as often, 0 to 1: a failure that the trainer would hardly have made is nearly
    ignored. Both bounds bias the gradient, towards the sampler's successes. About half of the tokens are
    beyond a bound even without noise.

    Args:
        ratio_RC: Ratio of the trainer's to the sampler's probabilities.
        advantages_R1: Advantages of the samples.
        most: Upper bound for good samples, at least 1.
    """
    good_R1 = advantages_R1 > 0
    return ratio_RC.clamp(min=good_R1.float(), max=torch.where(good_R1, most, 1.0))


def balance_ratio(
    trainer_logps_RC: torch.Tensor, noisy_logps_RC: torch.Tensor, share: float, mask_RC: torch.Tensor
) -> torch.Tensor:
    """pi / (share mu + (1 - share) pi) [R, C]: the ratio to the mixture from which a group was drawn.

    It is at most 1 / (1 - share) and so needs no bound, and it is exact for one token; weighing all samples
    by the mixture is the balance heuristic of multiple importance sampling (Veach and Guibas 1995).

    Args:
        trainer_logps_RC: Log-probabilities under the clean policy pi, of clean and noisy samples alike.
        noisy_logps_RC: Log-probabilities of the same tokens under the noisy policy mu, for all samples too;
            NaN counts as no mismatch.
        share: Share of the samples that mu drew, above 0 and below 1.
        mask_RC: 1 on tokens that count; elsewhere the ratio is 1.
    """
    difference_RC = torch.nan_to_num((noisy_logps_RC - trainer_logps_RC) * mask_RC, nan=0.0)
    return 1.0 / (share * difference_RC.exp() + (1.0 - share))
