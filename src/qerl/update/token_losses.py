"""Losses of single tokens: formulas that the trainer's loss and the server's losses are made of.

With p the policy's log-probability of a sampled token, q that of the policy that the ratio is taken to, r =
exp(p - q) the importance ratio and A the advantage. Each function computes elementwise, in the dtype of its
arguments, and shapes broadcast: a ratio per sequence stands beside log-probabilities per token. sg(x) is x
without a gradient.

Legend: B samples, C completion columns.
"""

from typing import Any

import torch

_LEAST_LOG, _LARGEST_LOG = -18.420680743952367, 20.0  # log 1e-8: of a ratio in VESPO's weight


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
        low, high: Bounds of the ratio itself, 0.8 and 1.2 for example; of different width is DAPO's
            clip-higher (arXiv 2503.14476).
        delta: Largest r in the first term, which else has no bound where A is negative: two-sided clipping
            (INTELLECT-2, arXiv 2505.07291).
    """
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    bounds: Any = low, high
    return -torch.minimum(bounded * advantages, ratio.clamp(*bounds) * advantages)


def weighted(weight: torch.Tensor, logps: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """- sg(w) A p: REINFORCE with a weight (Williams 1992).

    With w = clip(r, low, high) it is CISPO: the bounded ratio weighs a gradient that no token loses
    (MiniMax-M1, arXiv 2506.13585; one-sided as in ScaleRL, arXiv 2510.13786). With w of `gamma_weight` it is
    VESPO.
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


def kl_to(reference: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
    """e^d - d - 1 with d = log-probability under the reference - p: an estimate of the KL divergence to it,
    never negative (estimator k3 of Schulman, "Approximating KL divergence"; GRPO, arXiv 2402.03300).
    """
    d = reference - logps
    return d.exp() - d - 1
