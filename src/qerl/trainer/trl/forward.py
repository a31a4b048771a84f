"""Log-probabilities and entropies of samples of a padded batch, joined, in one forward pass of the policy.

The policy is called through the output head that TRL puts on it (`fused_lm_head=True`, `shift_labels`), which
computes logits in tiles and returns `log_probs` and `entropy` of the labels. Tied to trl 1.16.

Legend: B samples, C completion columns, S positions of a joined row that predict something.
"""

import torch

from qerl.trainer.trl.head import all_positions_scored
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
    device: torch.device,
    entropy_has_gradient: bool,
) -> Outputs:
    """Log-probabilities and entropies [B, C] of the given rows, zero elsewhere.

    Args:
        model, decoder, branch_attention, entropy_has_gradient: As in :func:`score`.
        batch: All samples, on the CPU or on the device.
        device: Where the model is.
        rows: Those to compute. Without any, the zeros are connected to the weights: the optimizer sees zero
            gradients, as it would in TRL.
    """
    samples, columns = batch.completion_ids_BC.shape
    if not rows:
        zeros_BC = torch.zeros(samples, columns, device=device)
        anchor = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return zeros_BC + anchor.to(zeros_BC), zeros_BC
    row = join(batch, rows, device)
    logps_1S, entropy_1S = score(model, decoder, row, branch_attention, entropy_has_gradient)
    return row.scatter(logps_1S, samples, columns), row.scatter(entropy_1S, samples, columns)


def score(
    model: torch.nn.Module,
    decoder: torch.nn.Module,
    row: JoinedRow,
    branch_attention: bool,
    entropy_has_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each completion token and entropy of its distribution in nats, [1, S] each.

    Args:
        model: The policy as it trains, wrapped or not, with TRL's output head.
        decoder: The part of it in front of the output head.
        row: The samples.
        branch_attention: Whether the model's attention reads stretches instead of a dense mask.
        entropy_has_gradient: Whether entropies are differentiated, too.
    """
    with (
        scored_only(decoder, row),
        row_inputs(decoder, row, branch_attention) as inputs,
        all_positions_scored(entropy_has_gradient),
    ):
        out = model(**inputs, shift_labels=row.labels_1L[:, row.scored_S], fused_lm_head=True)
    return out.log_probs, out.entropy
