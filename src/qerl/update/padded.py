"""Samples side by side in padded tensors, and how many tokens each adds to a joined row.

Legend: B samples, P padded prompt length, C padded completion length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Lengths:
    """Number of tokens that each sample adds to a joined row (`qerl.update.joined_row`).

    Attributes:
        own_B: Tokens of each sample's completion.
        shared_B: Tokens of its prompt but the last one, which the row holds once per group.
        group_B: Index of its group.
    """

    own_B: list[int]
    shared_B: list[int]
    group_B: list[int]

    def tokens(self, rows: Sequence[int]) -> int:
        """Number of tokens in the joined row that holds these samples."""
        shared = {self.group_B[row]: self.shared_B[row] for row in rows}
        return sum(self.own_B[row] for row in rows) + sum(shared.values())


@dataclass(frozen=True)
class PaddedBatch:
    """Left-padded prompts, right-padded completions, and which samples share a prompt.

    Attributes:
        prompt_ids_BP, prompt_mask_BP: int64; each prompt has at least one token.
        completion_ids_BC, completion_mask_BC: int64; each completion has at least one token.
        group_B: int64, index of each sample's group; samples of a group have the same prompt.
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    completion_ids_BC: torch.Tensor
    completion_mask_BC: torch.Tensor
    group_B: torch.Tensor

    @cached_property
    def lengths(self) -> Lengths:
        """Number of tokens that each sample adds to a joined row; asking waits for the device."""
        return Lengths(
            own_B=self.completion_mask_BC.sum(dim=1).tolist(),
            shared_B=(self.prompt_mask_BP.sum(dim=1) - 1).tolist(),
            group_B=self.group_B.tolist(),
        )
