"""TRL's loss on outputs that were computed elsewhere. Tied to trl 1.16.

`GRPOTrainer._compute_loss(model, inputs)` does nothing with the model but hand it to
`_get_per_token_logps_and_entropies`. `KnownOutputs` takes the model's place in that call and carries there
what the update has computed chunk by chunk, so that TRL's formulas run on it.
"""

from typing import NamedTuple

import torch


class KnownOutputs(NamedTuple):
    """Stands for the policy in TRL's loss.

    Attributes:
        logps_BC: Log-probability of each completion token.
        entropy_BC: Entropy of its distribution in nats.
    """

    logps_BC: torch.Tensor
    entropy_BC: torch.Tensor
