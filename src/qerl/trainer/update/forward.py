"""Log-probabilities and entropies of samples of a padded batch, packed, in one forward pass of the policy.

Legend: B samples, T padded tokens, C completion columns, S positions of a packed row that predict something.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from qerl.trainer.update.attention import seen_by
from qerl.trainer.update.chunks import Lengths, Outputs
from qerl.trainer.update.masks import masked_by_branch
from qerl.trainer.update.packing import PackedBatch, pack


@dataclass(frozen=True)
class Padded:
    """Samples as TRL has them: left-padded prompts beside right-padded completions.

    Attributes:
        input_ids_BT, attention_mask_BT: Both in one.
        columns: C, the width of the completions.
    """

    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    columns: int

    @property
    def _prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.input_ids_BT[:, : -self.columns], self.attention_mask_BT[:, : -self.columns]

    @property
    def _completions(self) -> tuple[torch.Tensor, torch.Tensor]:
        mask_BC = self.attention_mask_BT[:, -self.columns :].clone()
        mask_BC[:, 0] = 1  # a sample whose tokens the loss leaves out is only run to keep ranks in step
        return self.input_ids_BT[:, -self.columns :], mask_BC

    @cached_property
    def lengths(self) -> Lengths:
        """Tokens of each sample in a packed row."""
        return Lengths.of(*self._prompts, self._completions[1])

    def pack(self, rows: list[int]) -> PackedBatch:
        """Some of the samples as one row."""
        return pack(*self._prompts, *self._completions, rows)


def score_rows(
    model: torch.nn.Module, decoder: torch.nn.Module, padded: Padded, rows: list[int], branch_attention: bool
) -> Outputs:
    """Log-probabilities and entropies [B, C] of the rows given, zero elsewhere; the rest as for `score`."""
    batch = padded.input_ids_BT.size(0)
    if not rows:
        zeros_BC = torch.zeros(batch, padded.columns, device=padded.input_ids_BT.device)
        # A zero that is connected to the weights: the optimizer sees zero gradients, as it would in TRL.
        anchor = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return zeros_BC + anchor.to(zeros_BC), zeros_BC
    packed = padded.pack(rows)
    logps_1S, entropy_1S = score(model, decoder, packed, branch_attention)
    return packed.scatter(logps_1S, batch, padded.columns), packed.scatter(entropy_1S, batch, padded.columns)


def score(
    model: torch.nn.Module, decoder: torch.nn.Module, packed: PackedBatch, branch_attention: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each completion token and entropy of its distribution, [1, S] each.

    Args:
        model: The policy as it trains, wrapped or not, with TRL's chunked output head.
        decoder: The part of it in front of the output head.
        packed: The row.
        branch_attention: Whether the model's attention reads stretches instead of a dense mask.
    """
    scored_L = packed.sample_L >= 0
    by_stretch = contextlib.nullcontext(seen_by(packed.branches))
    seeing = by_stretch if branch_attention else masked_by_branch(decoder.config, packed)
    with _scored_only(decoder, scored_L), seeing as seen:
        out = model(
            input_ids=packed.input_ids_1L,
            position_ids=packed.position_ids_1L,
            **seen,
            shift_labels=packed.labels_1L[:, scored_L],
            fused_lm_head=True,
        )
    return out.log_probs, out.entropy


@contextlib.contextmanager
def _scored_only(decoder: torch.nn.Module, scored_L: torch.Tensor) -> Iterator[None]:
    """Hand the output head only the positions that predict something: shared prompts do not."""

    def select(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, scored_L]
        return output

    handle = decoder.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
