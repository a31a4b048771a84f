"""A forward pass of a joined row.

Legend: L tokens of the joined row, S positions of it that predict something, D hidden size.
"""

import contextlib
from typing import Any

import torch
from transformers import PreTrainedModel

from qerl.update.attention import attention_kwargs
from qerl.update.head import Head, logps_and_entropies
from qerl.update.joined_row import JoinedRow, masked_by_branch


def hidden_states(decoder: torch.nn.Module, row: JoinedRow, by_stretch: bool) -> torch.Tensor:
    """What the part of a model in front of its output head makes of a row, [L, D].

    Args:
        decoder: That part.
        row: The samples.
        by_stretch: Whether the model's attention reads stretches instead of a dense mask.

    Raises:
        QeRLError: The model's attention implementation makes no masks that a row could use.
    """
    stretches = contextlib.nullcontext(attention_kwargs(row.branches)) if by_stretch else None
    with stretches or masked_by_branch(decoder.config, row) as attention:
        out = decoder(
            input_ids=row.input_ids_1L, position_ids=row.position_ids_1L, use_cache=False, **attention
        )
    hidden_1LD: torch.Tensor = out.last_hidden_state
    return hidden_1LD[0]


def score(
    model: torch.nn.Module,
    base: PreTrainedModel,
    row: JoinedRow,
    by_stretch: bool,
    temperature: float = 1.0,
    entropy_has_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label of a row and entropy of its distribution in nats, [S] each.

    Args:
        model: The transformers model as it trains, wrapped by PEFT and for several processes or not. The
            wrappers see a forward pass, since gradients are averaged over processes only after one.
        base: The transformers model in it.
        row, by_stretch: As in `hidden_states`.
        temperature: Divides logits.
        entropy_has_gradient: Whether entropies are differentiated, too.
    """

    def forward(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_SD = hidden_states(base.base_model, row, by_stretch)[row.scored_S]
        labels_S = row.labels_1L[0, row.scored_S]
        return logps_and_entropies(hidden_SD, Head.of(base, temperature), labels_S, entropy_has_gradient)

    own = vars(base).get("forward")
    vars(base)["forward"] = forward
    try:
        logps_S, entropy_S = model(input_ids=row.input_ids_1L)
    finally:
        if own is None:
            del vars(base)["forward"]
        else:
            vars(base)["forward"] = own
    return logps_S, entropy_S
