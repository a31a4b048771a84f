"""What a loss of token log-probabilities is given, and what it gives back.

Legend: T tokens of a datum, K targets of a position.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Datum:
    """One sequence, and what its loss reads at each of its tokens.

    Attributes:
        tokens: [T] int64, what the model reads; position i predicts `target_tokens[i]`.
        inputs: By name: `target_tokens` [T], or [T, K] for soft targets, int64; all else float32 of the same
            shape, or [T]: `weights`, `logprobs`, `advantages`, `mask`, as the loss asks for.
    """

    tokens: torch.Tensor
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LossOutput:
    """What a pass over some data found.

    Attributes:
        logprobs: For each datum the log-probabilities of its targets in nats, [T] or [T, K], float32 on the
            CPU.
        metrics: Numbers by `name:reduction`, where the reduction says how those of two calls are put
            together; `loss:sum` is always there.
    """

    logprobs: list[torch.Tensor]
    metrics: dict[str, float]
