"""Groups of which a share is drawn with noise, the rest by the clean policy, and which of the two finds more.

Both parts answer the same prompts, so what noise does for exploration is measured in every step: rewards of
noisy samples minus those of clean ones, and how often one part alone solves a prompt. With a share of a half
both have as many tries.

In a group the noisy samples come first.

Legend: B samples, groups adjacent; N groups, G samples of a group.
"""

from collections.abc import Sequence

import torch

from qerl.rollout.engine import RolloutResult


def is_noisy(samples: int, group_size: int, noisy: int) -> torch.Tensor:
    """The mask [B], bool, of samples that were drawn with noise, in whole groups."""
    return torch.arange(samples) % group_size < noisy


def side_by_side(results: Sequence[RolloutResult], prompts: int) -> RolloutResult:
    """Several rollouts of the same prompts as one, the samples of a prompt next to each other.

    Args:
        results: In the order in which their samples stand in a group.
        prompts: Number of prompts.
    """
    if len(results) == 1:
        return results[0]
    each = [(result, len(result.completions) // prompts) for result in results]
    return RolloutResult(
        completions=[
            completion
            for prompt in range(prompts)
            for result, count in each
            for completion in result.completions[prompt * count : (prompt + 1) * count]
        ],
        prompt_tokens=sum(result.prompt_tokens for result in results),
        generated_tokens=sum(result.generated_tokens for result in results),
        seconds=sum(result.seconds for result in results),
    )


def compare(
    total_B: torch.Tensor, right_B: torch.Tensor | None, group_size: int, noisy: int
) -> dict[str, float]:
    """What noise finds that the clean policy does not, as metrics of a step.

    Args:
        total_B: Total reward of each sample of whole groups; NaN where there is none, which is in no mean.
        right_B: 1 for a right sample, 0 for a wrong one, NaN for neither; None where nothing judges.
        group_size: G.
        noisy: Noisy samples of a group, above 0 and below G.
    """
    metrics = {"noise/reward_gain": _gain(total_B, group_size, noisy)}
    if right_B is not None:
        solved = [
            (part_NG == 1).any(dim=1) for part_NG in _parts(right_B, group_size, noisy)
        ]  # by the noisy part, by the clean part
        metrics |= {
            "noise/success_gain": _gain(right_B, group_size, noisy),
            "noise/only_noisy_solves": (solved[0] & ~solved[1]).double().mean().item(),
            "noise/only_clean_solves": (solved[1] & ~solved[0]).double().mean().item(),
        }
    return metrics


def _gain(values_B: torch.Tensor, group_size: int, noisy: int) -> float:
    """The mean over prompts of the noisy samples' mean minus the clean ones'."""
    first_N, second_N = (part.nanmean(dim=1) for part in _parts(values_B, group_size, noisy))
    return (first_N - second_N).nanmean().item()


def _parts(values_B: torch.Tensor, group_size: int, noisy: int) -> tuple[torch.Tensor, ...]:
    return values_B.double().unflatten(0, (-1, group_size)).split([noisy, group_size - noisy], dim=1)
