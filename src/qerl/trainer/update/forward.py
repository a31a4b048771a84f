"""Log-probabilities and entropies of samples of a padded batch, joined, in one forward pass of the policy.

The policy is called through the output head that TRL puts on it (`fused_lm_head=True`, `shift_labels`), which
computes logits in tiles and returns `log_probs` and `entropy` of the labels. Tied to trl 1.16.

Legend: B samples, C completion columns, L tokens of the joined row, S positions of it that predict something.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from qerl.trainer.update.attention import attention_kwargs
from qerl.trainer.update.chunks import Outputs
from qerl.trainer.update.joined_row import JoinedRow, join
from qerl.trainer.update.masks import masked_by_branch
from qerl.trainer.update.padded import PaddedBatch


def score_rows(
    model: torch.nn.Module,
    decoder: torch.nn.Module,
    batch: PaddedBatch,
    rows: list[int],
    branch_attention: bool,
) -> Outputs:
    """Log-probabilities and entropies [B, C] of the given rows, zero elsewhere.

    Args:
        model, decoder, branch_attention: As in :func:`score`.
        batch: All samples.
        rows: Those to compute. Without any, the zeros are connected to the weights: the optimizer sees zero
            gradients, as it would in TRL.
    """
    samples, columns = batch.completion_ids_BC.shape
    if not rows:
        zeros_BC = torch.zeros(samples, columns, device=batch.completion_ids_BC.device)
        anchor = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return zeros_BC + anchor.to(zeros_BC), zeros_BC
    row = join(batch, rows)
    logps_1S, entropy_1S = score(model, decoder, row, branch_attention)
    return row.scatter(logps_1S, samples, columns), row.scatter(entropy_1S, samples, columns)


def score(
    model: torch.nn.Module, decoder: torch.nn.Module, row: JoinedRow, branch_attention: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each completion token and entropy of its distribution in nats, [1, S] each.

    Args:
        model: The policy as it trains, wrapped or not, with TRL's output head.
        decoder: The part of it in front of the output head.
        row: The samples.
        branch_attention: Whether the model's attention reads stretches instead of a dense mask.
    """
    scored_L = row.sample_L >= 0
    by_stretch = contextlib.nullcontext(attention_kwargs(row.branches))
    seeing = by_stretch if branch_attention else masked_by_branch(decoder.config, row)
    with _scored_only(decoder, scored_L), seeing as attention:
        out = model(
            input_ids=row.input_ids_1L,
            position_ids=row.position_ids_1L,
            **attention,
            shift_labels=row.labels_1L[:, scored_L],
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
