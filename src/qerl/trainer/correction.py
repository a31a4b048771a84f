"""Small pure functions of the update: importance correction, divergence, and which samples matter.

Legend: B samples, C completion columns.
"""

import math

import torch


def importance_ratio(
    trainer_logps_BC: torch.Tensor,
    sampler_logps_BC: torch.Tensor,
    mask_BC: torch.Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """Weight pi_trainer / pi_sampler that corrects a loss on samples of the (noisy, quantised) sampler.

    Truncated importance sampling (token_truncate, sequence_truncate) bounds the weight; the mask modes drop
    what lies outside the bounds. The modes and bounds are TRL's `vllm_importance_sampling_*` options.

    Args:
        trainer_logps_BC: Log-probabilities of the sampled tokens under the clean policy, without gradient.
        sampler_logps_BC: The same tokens under the policy that sampled them; NaN counts as no mismatch.
        mask_BC: 1 on tokens of the completion.
        mode: token_truncate, token_mask, sequence_truncate or sequence_mask.
        clip_min, clip_max: Bounds of the ratio, None for none.

    Returns:
        [B, C] for the token modes, [B, 1] for the sequence modes.
    """
    difference_BC = torch.nan_to_num((trainer_logps_BC - sampler_logps_BC) * mask_BC, nan=0.0)
    level, _, action = mode.partition("_")
    if level == "sequence":
        difference_BC = difference_BC.sum(dim=-1, keepdim=True)
    ratio = difference_BC.exp()
    if action == "truncate":
        return ratio.clamp(min=clip_min, max=clip_max)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def sampler_trainer_kl(
    trainer_logps_BC: torch.Tensor, sampler_logps_BC: torch.Tensor, mask_BC: torch.Tensor
) -> torch.Tensor:
    """Estimates [B, C] of KL(sampler || trainer) in nats, one for each of the sampler's own tokens.

    The estimator exp(d) - 1 - d with d = log pi_trainer - log pi_sampler is unbiased and never negative
    (Schulman, "Approximating KL divergence", estimator k3).
    """
    d_BC = torch.nan_to_num((trainer_logps_BC - sampler_logps_BC) * mask_BC, nan=0.0)
    return (torch.expm1(d_BC) - d_BC) * mask_BC


def rows_with_gradient(advantages_B: torch.Tensor, mask_BC: torch.Tensor) -> list[int]:
    """Samples that can move the policy: their advantage is not zero and the loss sees at least one token."""
    return ((advantages_B != 0) & (mask_BC.sum(dim=-1) > 0)).nonzero().flatten().tolist()
