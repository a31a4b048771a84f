"""Log-probabilities and entropies of a packed row in one forward pass of the policy."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from qerl.trainer.attention import seen_by
from qerl.trainer.packing import PackedBatch


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
    seen = seen_by(packed.branches) if branch_attention else {"attention_mask": packed.attention_mask_11LL}
    with _scored_only(decoder, scored_L):
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
