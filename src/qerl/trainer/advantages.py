"""Advantages from rewards, and the groups that have a signal.

A group has a signal if the rewards of its samples differ. This is decided on rewards, not on advantages:
eight times 0.1 minus their mean is not 0 in FP32, and divided by a standard deviation of the same rounding
error it is large enough to be taken for a signal. So rewards are compared as they are, and the advantages of
a group without signal are exactly 0, which tells the update to skip the group.

The setting `signal` says which difference counts. `reward`: any difference of the total. `accuracy`: only the
difference between right and wrong samples, DAPO's condition 0 < right < G (arXiv 2503.14476, equation 11). A
group in which all samples are wrong and differ only in form or length is not part of DAPO's batch; scaled by
its own standard deviation it would weigh as much as a right answer.

The formulas are TRL's (`scale_rewards`, `multi_objective_aggregation`), in FP64. TRL computes them inside its
rollout, where samples cannot be removed from a group nor groups from the batch. Here they can: a sample whose
rewards are all NaN (no reward function applied to it, or the loss masks it because it was truncated) is left
out of every mean and standard deviation, and has no advantage. The advantages that the loss sees therefore
add up to 0 in each group, even if truncated samples are masked; in TRL they do not, and the remainder moves
the policy towards or away from all samples that ended.

**pass@k.** With `pass_at_k` the objective is the best of k samples instead of each sample by itself. The
reward of a sample is then the mean, over all sets of k samples of its group that contain it, of the best
reward in the set (`best_of_k`); the rest is as above. This is the transformed reward of "Pass@K Policy
Optimization" (arXiv 2505.15201), centred within the group as in "Pass@k Training" (arXiv 2508.10751). A right
sample among many counts little, as it was not needed, and a group with fewer wrong samples than k has nothing
left to teach.

The signal of pass@k is the distance between right and wrong samples, which depends on how many are right. So
it needs `scale: none` or `batch`: divided by the standard deviation of its group, that distance is lost, and
where samples are only right or wrong, the advantages would be those without pass@k.

**MaxRL.** With `scale: mean` the distance from the group's mean is divided by that mean (arXiv 2602.02710).
For rewards of 0 and 1 a right answer then has the advantage 1 / p - 1, where p is the share of right samples,
and the expected gradient is, instead of that of p, that of the series of log p in 1 - p up to order G - 1.
MaxRL is made for rewards that are not negative; a group whose mean is 0 or less has no signal.

Legend: B samples of all processes, groups adjacent; N groups, G samples of a group; F reward functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qerl.errors import QeRLError

JUDGE = "accuracy"
# TRL's name of its length penalty, which does not tell right from wrong.
_LENGTH_PENALTY = "soft_overlong_punishment_reward"


def find_judge(names: Sequence[str]) -> int | None:
    """Return the index of the reward function that tells right samples from wrong ones, or None.

    That is `accuracy`, else the only function besides a length penalty.
    """
    if JUDGE in names:
        return names.index(JUDGE)
    judges = [name for name in names if name != _LENGTH_PENALTY]
    return names.index(judges[0]) if len(judges) == 1 else None


def judge_of(names: Sequence[str]) -> int:
    """Return the index that `find_judge` finds.

    Raises:
        QeRLError: No function tells right from wrong.
    """
    judge = find_judge(names)
    if judge is not None:
        return judge
    raise QeRLError(
        f"signal: accuracy needs a reward function named {JUDGE!r}, which is not among the reward functions "
        f"({', '.join(names)}); rename one, or set signal: reward."
    )


def in_parts(verdict_B: torch.Tensor) -> bool:
    """Return True if the judge gives partial credit: rewards above 0, of right samples, differ."""
    return len(verdict_B[verdict_B > 0].unique()) > 1


@dataclass(frozen=True)
class Signal:
    """Settings by which rewards become advantages.

    Attributes:
        group_size: G.
        weights_F: Weights of the reward functions in the total.
        scale: TRL's `scale_rewards`: group, batch or none; or mean.
        aggregation: TRL's `multi_objective_aggregation`: sum_then_normalize or normalize_then_sum.
        judge: Index of the reward function by which a sample is right (above 0) or wrong (0 and below); None
            if any difference of rewards is a signal.
        pass_at_k: k of pass@k, at least 2 and less than G; needs `sum_then_normalize` and a scale of none or
            batch. None rewards each sample by itself.
    """

    group_size: int
    weights_F: torch.Tensor
    scale: str
    aggregation: str
    judge: int | None = None
    pass_at_k: int | None = None

    def zero_advantage(self, rewards_BF: torch.Tensor) -> torch.Tensor:
        """Return the mask [N], bool, of groups without signal. NaN marks a reward that was not given."""
        if self.aggregation == "sum_then_normalize":
            # Rounded to the FP32 of the rewards: FP64 differences below that come from the order of a sum.
            values_BF = self._credit(rewards_BF).float()[:, None]
        else:
            values_BF = rewards_BF * (self.weights_F != 0)
        values_NGF = values_BF.unflatten(0, (-1, self.group_size))
        unknown_NGF = values_NGF.isnan()
        lowest_NF = values_NGF.masked_fill(unknown_NGF, torch.inf).amin(dim=1)
        highest_NF = values_NGF.masked_fill(unknown_NGF, -torch.inf).amax(dim=1)
        alive_N = (highest_NF > lowest_NF).any(dim=1)
        if self.scale == "mean":
            alive_N &= values_NGF.nanmean(dim=(1, 2)) > 0
        if self.judge is not None:
            verdict_NG = rewards_BF[:, self.judge].unflatten(0, (-1, self.group_size))
            alive_N &= (verdict_NG > 0).any(dim=1) & (verdict_NG <= 0).any(dim=1)
        return ~alive_N

    def advantages(self, rewards_BF: torch.Tensor) -> torch.Tensor:
        """Return the advantages [B], fp32; exactly 0 in groups without signal and where no reward was given.

        Args:
            rewards_BF: Rewards of whole groups; with `scale: batch` or `normalize_then_sum` of all processes.
        """
        zero_B = self.zero_advantage(rewards_BF).repeat_interleave(self.group_size)
        if self.judge is not None:  # the scale of the batch leaves such groups out
            rewards_BF = rewards_BF.masked_fill(zero_B[:, None], torch.nan)
        rewards_BF = rewards_BF.double()
        if self.aggregation == "sum_then_normalize":
            advantages_B = self._centred(self._credit(rewards_BF), self.scale)
        else:
            each = [self._centred(rewards_B, "group") for rewards_B in rewards_BF.unbind(1)]
            total_B = self.total(torch.stack(each, dim=1))
            advantages_B = (total_B - total_B.nanmean()) / (_std(total_B, 0) + 1e-4)
        return advantages_B.nan_to_num(nan=0.0).masked_fill(zero_B, 0.0).float()

    def statistics(self, rewards_BF: torch.Tensor, size: int, names: Sequence[str]) -> dict[str, float]:
        """Return the logged statistics of rewards, under TRL's names.

        Args:
            rewards_BF: Rewards of whole groups of all processes.
            size: Samples per group, which may differ from `group_size` in an evaluation.
            names: Names of the reward functions; an empty list logs nothing.
        """
        found: dict[str, float] = {}
        if not names:
            return found
        for name, rewards_B in zip(names, rewards_BF.unbind(1), strict=True):
            found |= {f"rewards/{name}/mean": rewards_B.nanmean().item()}
            found |= {f"rewards/{name}/std": _std(rewards_B, 0).item()}
        total_B = self.total(rewards_BF).float()
        found |= {"reward": total_B.nanmean().item(), "reward_std": _std(total_B, 0).item()}
        if self.aggregation == "normalize_then_sum":
            whole = replace(self, group_size=size)
            each = [whole._centred(rewards_B, "group") for rewards_B in rewards_BF.double().unbind(1)]
            total_B = self.total(torch.stack(each, dim=1))
        by_batch = self.aggregation == "normalize_then_sum" or self.scale == "batch"
        values = total_B[None] if by_batch and size > 1 else total_B.unflatten(0, (-1, size))
        if values.size(1) == 1:  # one sample does not differ
            return found | {"frac_reward_zero_std": 1.0}
        spread = _std(values, 1)
        return found | {"frac_reward_zero_std": torch.isclose(spread, spread * 0).float().mean().item()}

    def overruled(self, rewards_BF: torch.Tensor) -> bool:
        """Return True if rewards differ, but the judge finds every group all right or all wrong."""
        any_difference = replace(self, judge=None)
        return bool(
            self.zero_advantage(rewards_BF).all() and not any_difference.zero_advantage(rewards_BF).all()
        )

    def _credit(self, rewards_BF: torch.Tensor) -> torch.Tensor:
        """Return the total reward of each sample, [B], after pass@k; NaN where no reward was given."""
        total_B = self.total(rewards_BF)
        if self.pass_at_k is None:
            return total_B
        # Rounded as in `zero_advantage`: samples of equal reward are equally good in any set.
        total_NG = total_B.float().double().unflatten(0, (-1, self.group_size))
        return best_of_k(total_NG, self.pass_at_k).flatten()

    def total(self, rewards_BF: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [B] of the given rewards, NaN where none is given."""
        total_B = (rewards_BF.double() * self.weights_F).nansum(dim=1)
        return total_B.masked_fill(rewards_BF.isnan().all(dim=1), torch.nan)

    def _centred(self, rewards_B: torch.Tensor, scale: str) -> torch.Tensor:
        """Return distances from the group's mean: divided by the standard deviation of the group or batch, by
        that mean, or by nothing."""
        rewards_NG = rewards_B.unflatten(0, (-1, self.group_size))
        centred_NG = rewards_NG - rewards_NG.nanmean(dim=1, keepdim=True)
        if scale == "group":
            centred_NG = centred_NG / (_std(rewards_NG, 1) + 1e-4)
        elif scale == "batch":
            centred_NG = centred_NG / (_std(rewards_B, 0) + 1e-4)
        elif scale == "mean":
            centred_NG = centred_NG / rewards_NG.nanmean(dim=1, keepdim=True)
        return centred_NG.flatten()


def best_of_k(rewards_NG: torch.Tensor, k: int) -> torch.Tensor:
    """Return, for each sample, the mean of the best reward over all sets of k from its group that contain it.

    The mean over a group is the unbiased estimate of the best reward of k samples; for rewards of 0 and 1
    that is pass@k, 1 - C(wrong, k) / C(G, k). With k = 1 it is the reward.

    Args:
        rewards_NG: Rewards of whole groups, fp64. A NaN does not count as a sample of its group.
        k: Samples per set.

    Returns:
        [N, G], fp64; NaN where there is no reward, and in groups of fewer than k samples.
    """
    size = rewards_NG.size(1)
    # sets[p][q]: number of sets with the sample of rank p, from the lowest, and their best at rank q >= p.
    sets = [[0 if q < p else _below(q, p, k) for q in range(size)] for p in range(size)]
    sets_PQ = torch.tensor(sets, dtype=torch.double, device=rewards_NG.device)
    sorted_NG, order_NG = rewards_NG.double().sort(dim=1)  # NaN last
    known_N = (~rewards_NG.isnan()).sum(dim=1).tolist()
    all_N1 = torch.tensor(
        [[math.comb(n - 1, k - 1) if n else 0] for n in known_N],
        dtype=torch.double,
        device=rewards_NG.device,
    )
    best_NG = sorted_NG.nan_to_num(nan=0.0) @ sets_PQ.T / all_N1.masked_fill(all_N1 == 0, torch.nan)
    best_NG = best_NG.masked_fill(sorted_NG.isnan(), torch.nan)
    return torch.empty_like(best_NG).scatter(1, order_NG, best_NG)


def _below(best: int, sample: int, k: int) -> int:
    """Return the number of sets of k that contain ``sample`` and have ``best`` at the top; 0-based ranks."""
    if best == sample:
        return math.comb(sample, k - 1)
    return math.comb(best - 1, k - 2) if k >= 2 else 0


def _std(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the standard deviation with n - 1 of the values that are not NaN; NaN for fewer than two."""
    deviation = values - values.nanmean(dim=dim, keepdim=True)
    known = (~values.isnan()).sum(dim=dim, keepdim=True)
    return (deviation.square().nansum(dim=dim, keepdim=True) / (known - 1).clamp(min=0)).sqrt()
