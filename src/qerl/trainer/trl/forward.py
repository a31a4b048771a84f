"""Log-probabilities and entropies of samples of a padded batch, joined, in one forward pass of the policy.

The policy is called through the output head that TRL puts on it (`fused_lm_head=True`, `shift_labels`), which
computes logits in tiles and returns `log_probs` and `entropy` of the labels. Tied to trl 1.16.

Legend: B samples, C completion columns, S positions of a joined row that predict something.
"""

import torch

from qerl.update.chunks import Outputs
from qerl.update.forward import row_inputs, scored_only
from qerl.update.joined_row import JoinedRow, join
from qerl.update.padded import PaddedBatch


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
    with scored_only(decoder, scored_L), row_inputs(decoder, row, branch_attention) as inputs:
        out = model(**inputs, shift_labels=row.labels_1L[:, scored_L], fused_lm_head=True)
    return out.log_probs, out.entropy
