"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): no group without a gradient.

A group whose rewards are all equal has zero advantages and teaches nothing. It is replaced by a group of a
fresh prompt, for a bounded number of extra rollouts; what still has no signal then stays as it is. Which
prompts are fresh depends on (seed, step, round) alone, so a resumed run draws the same.

Batches are TRL's: dictionaries of tensors whose first axis is the sample, groups adjacent. Legend: B samples,
G samples in a group, P prompt columns, C completion columns.
"""

from typing import Any

import torch
from datasets import Dataset

from qerl.seeding import generator

Batch = dict[str, torch.Tensor]

# How each tensor of a batch is padded when two batches are joined: (side, value). The pad token is filled in.
_PADDED = {
    "prompt_ids": "left",
    "prompt_mask": "left",
    "completion_ids": "right",
    "completion_mask": "right",
    "sampling_per_token_logps": "right",
    "old_per_token_logps": "right",
    "ref_per_token_logps": "right",
    "importance_sampling_ratio": "right",
    "tool_mask": "right",
}


def groups_without_signal(advantages_B: torch.Tensor, group_size: int) -> list[int]:
    """Indices of the groups whose advantages are all zero."""
    return (advantages_B.view(-1, group_size) == 0).all(dim=1).nonzero().flatten().tolist()


def fresh_rows(
    dataset: Dataset, used_prompts: list[Any], count: int, *coordinates: int
) -> list[dict[str, Any]]:
    """Rows of the data set whose prompts are not in use, as long as there are any.

    Args:
        dataset: Rows with a column `prompt`.
        used_prompts: Prompts of the present batch.
        count: How many to draw; a small data set may repeat rows.
        coordinates: (seed, step, round), the key of the draw.
    """
    order = torch.randperm(len(dataset), generator=generator("fresh", *coordinates)).tolist()
    rows: list[dict[str, Any]] = []
    for index in order:
        row = dataset[index]
        if row["prompt"] not in used_prompts:
            rows.append(row)
        if len(rows) == count:
            return rows
    pool = rows or [dataset[index] for index in order]
    return [pool[i % len(pool)] for i in range(count)]


def replace_groups(
    batch: Batch, targets: list[int], fresh: Batch, sources: list[int], group_size: int, pad: int
) -> Batch:
    """`batch` with the groups `targets` replaced by the groups `sources` of `fresh`.

    Args:
        batch, fresh: Batches with the same keys; their widths may differ.
        targets, sources: Group indices, pairwise.
        group_size: Samples in a group.
        pad: Pad token of the ids.

    Returns:
        A new batch of the first one's size; scalars (TRL's token count) are the first one's and must be
        recomputed.
    """
    to = _samples(targets, group_size)
    source = _samples(sources, group_size)
    out = {}
    for key, old in batch.items():
        if old.ndim == 0:
            out[key] = old
            continue
        new = fresh[key]
        if key in _PADDED and old.ndim == 2:
            value = pad if key.endswith("_ids") else 0
            width = max(old.size(1), new.size(1))
            old, new = (_widen(t, width, _PADDED[key], value) for t in (old, new))
        out[key] = old.index_copy(0, to.to(old.device), new.index_select(0, source.to(new.device)))
    return out


def _samples(groups: list[int], group_size: int) -> torch.Tensor:
    return (torch.tensor(groups)[:, None] * group_size + torch.arange(group_size)).flatten()


def _widen(t: torch.Tensor, width: int, side: str, value: float) -> torch.Tensor:
    missing = width - t.size(1)
    amount = (missing, 0) if side == "left" else (0, missing)
    return torch.nn.functional.pad(t, amount, value=value)
