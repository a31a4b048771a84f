"""TRL's batch of samples: a dictionary of tensors whose first axis is the sample, but for scalars.

A rollout holds whole groups, the samples of a group side by side: TRL repeats each prompt `num_generations`
times. Whoever takes samples out of that order (a microbatch, a chunk, a checkpoint) needs to know which of
them share a prompt, so the batch says it itself, in `GROUP_KEY`.

Legend: B samples, C padded completion length, T tokens of prompt and completion.
"""

import torch

from qerl.update.padded import PaddedBatch

Batch = dict[str, torch.Tensor]

GROUP_KEY = "group"
"""Key of the index [B] of each sample's prompt within its rollout, int64: of its group, unless an environment
has shown the samples of a group different prompts."""

PADDED_ON = {
    "prompt_ids": "left",
    "prompt_mask": "left",
    "completion_ids": "right",
    "completion_mask": "right",
    "sampling_per_token_logps": "right",
    "sampling_entropies": "right",
    "old_per_token_logps": "right",
    "ref_per_token_logps": "right",
    "tool_mask": "right",
}
"""The side on which each tensor [B, tokens] of a batch is padded."""


def group_index(batch: Batch, group_size: int) -> torch.Tensor:
    """The index [B] of each sample's prompt in a rollout that holds whole groups side by side.

    Args:
        batch: With `prompt_ids` and `prompt_mask`.
        group_size: Samples per group, of which neighbours with the same prompt share it.
    """
    ids_BP, mask_BP = batch["prompt_ids"], batch["prompt_mask"]
    begins_B = torch.arange(len(ids_BP), device=ids_BP.device) % group_size == 0
    differs_B = (ids_BP[1:] != ids_BP[:-1]).any(dim=1) | (mask_BP[1:] != mask_BP[:-1]).any(dim=1)
    begins_B[1:] |= differs_B
    return begins_B.cumsum(dim=0) - 1


def on_host(batch: Batch) -> Batch:
    """Copies on the CPU of what says which tokens and samples an update computes.

    From them rows are joined and divided without asking the device.
    """
    wanted = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"}
    return {name: batch[name].cpu() for name in batch.keys() & (wanted | {GROUP_KEY})}


def padded(batch: Batch) -> PaddedBatch:
    """The samples of a batch as the update takes them.

    A completion of which the loss sees no token keeps its first one: such a sample is run only to keep
    processes in step.
    """
    mask_BC = batch["completion_mask"].clone()
    mask_BC[:, 0] = 1
    prompt = batch["prompt_ids"], batch["prompt_mask"]
    return PaddedBatch(*prompt, batch["completion_ids"], mask_BC, batch[GROUP_KEY])


def padded_rollout(ids_BT: torch.Tensor, mask_BT: torch.Tensor, columns: int, group_size: int) -> PaddedBatch:
    """The samples of a whole rollout, where TRL has put prompts and completions side by side.

    Args:
        ids_BT, mask_BT: Prompts and completions of whole groups, side by side.
        columns: C, the width of the completions.
        group_size: Samples per group.
    """
    ids, masks = (t.split([t.size(1) - columns, columns], dim=1) for t in (ids_BT, mask_BT))
    batch = {"prompt_ids": ids[0], "completion_ids": ids[1]}
    batch |= {"prompt_mask": masks[0], "completion_mask": masks[1]}
    return padded(batch | {GROUP_KEY: group_index(batch, group_size)})
