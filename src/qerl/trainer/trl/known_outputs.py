"""TRL's loss on outputs that were computed elsewhere. Tied to trl 1.16.

`GRPOTrainer._compute_loss(model, inputs)` does nothing with the model but hand it to
`_get_per_token_logps_and_entropies`. `KnownOutputs` takes the model's place in that call and carries there
what the update has computed chunk by chunk, so that TRL's formulas run on it.

TRL multiplies what it makes of each token with the mask. At tokens that others wrote the policy may be
anywhere: a term that overflows there is infinite, and infinity times zero is NaN. So what stands at such
tokens is taken out before.
"""

from typing import NamedTuple

import torch

from qerl.trainer.batch import Batch
from qerl.update.chunks import Outputs

_LOGPS = {"old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"}


class KnownOutputs(NamedTuple):
    """Stands for the policy in TRL's loss.

    Attributes:
        logps_BC: Log-probability of each completion token.
        entropy_BC: Entropy of its distribution in nats.
    """

    logps_BC: torch.Tensor
    entropy_BC: torch.Tensor


def known_where(mask_BC: torch.Tensor, outputs: Outputs, batch: Batch) -> tuple[KnownOutputs, Batch]:
    """What TRL's loss reads, with zeros at tokens outside of the mask.

    Args:
        mask_BC: 1 on tokens that the policy wrote and the loss sees.
        outputs: Log-probabilities and entropies [B, C] of the policy.
        batch: The microbatch, with log-probabilities of other policies.
    """
    outside_BC = ~mask_BC.bool()
    known = KnownOutputs(*(values_BC.masked_fill(outside_BC, 0.0) for values_BC in outputs))
    others = {name: batch[name].masked_fill(outside_BC, 0.0) for name in _LOGPS & batch.keys()}
    return known, batch | others
