"""Log-probabilities of chosen tokens and their gradients, without the logits of a whole row.

A row of L positions has L x V logits, gigabytes for the vocabularies of today. Here positions go through the
output head some at a time; of each tile only the log-probabilities of the targets are kept. For gradients a
tile is computed again, with those positions alone whose targets pull at anything: in a batch of samples with
prompts, prompts do not. Any number of targets stands at a position, so soft targets, and samples that share
a prompt, cost one product with the head per position.

From hidden states to logits a model may scale, cap or add; each family has its own names for it. So the
model's own forward pass is run with its decoder replaced by the hidden states of the tile.

Legend: L tokens of a row, D hidden size, V vocabulary, P pairs of a position and a target, n positions of a
tile.
"""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

TILE = 1 << 26
"""Logits of a tile: 256 MB in float32, and some times that while their gradient is computed."""


def target_logps(
    model: PreTrainedModel, hidden_LD: torch.Tensor, position_P: torch.Tensor, target_P: torch.Tensor
) -> torch.Tensor:
    """Log-probability [P] of each target at its position, float32, without a graph.

    Args:
        model: The transformers model.
        hidden_LD: What its decoder gave for the row.
        position_P, target_P: int64 on the CPU.
    """
    logps_P = torch.empty(len(position_P), device=hidden_LD.device)
    with torch.no_grad():
        for rows_n, pairs, local in _tiles(position_P, _positions(model)):
            logits_nV = logits(model, hidden_LD[rows_n.to(hidden_LD.device)])
            found = _logps(logits_nV, local, target_P[pairs])
            logps_P[pairs.to(hidden_LD.device)] = found
    return logps_P


def head_backward(
    model: PreTrainedModel,
    hidden_LD: torch.Tensor,
    position_P: torch.Tensor,
    target_P: torch.Tensor,
    gradient_P: torch.Tensor,
) -> torch.Tensor:
    """The gradient [L, D] of hidden states from those of log-probabilities; adds to that of the head.

    Args:
        model, hidden_LD, position_P, target_P: As in `target_logps`.
        gradient_P: Of a loss with respect to each log-probability, on the CPU; pairs where it is 0 cost
            nothing.
    """
    gradient_LD = torch.zeros_like(hidden_LD, requires_grad=False)
    pulls = gradient_P.nonzero()[:, 0]
    position_P, target_P, gradient_P = position_P[pulls], target_P[pulls], gradient_P[pulls]
    for rows_n, pairs, local in _tiles(position_P, _positions(model)):
        rows_n = rows_n.to(hidden_LD.device)
        hidden_nD = hidden_LD[rows_n].detach().requires_grad_()
        with torch.enable_grad():
            logps = _logps(logits(model, hidden_nD), local, target_P[pairs])
        logps.backward(gradient_P[pairs].to(logps))
        assert hidden_nD.grad is not None
        gradient_LD[rows_n] = hidden_nD.grad
    return gradient_LD


def logits(model: PreTrainedModel, hidden_nD: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] of hidden states, float32, by the model's own code."""
    decoder = model.base_model
    own = decoder.__dict__.get("forward")
    # Mixtures of experts look for what their router said, too; here it said nothing.
    decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden_nD[None])
    try:
        out = model(input_ids=torch.zeros(1, len(hidden_nD), dtype=torch.long, device=hidden_nD.device))
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
    return out.logits[0].float()


def _logps(logits_nV: torch.Tensor, local: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    device = logits_nV.device
    local, target = local.to(device), target.to(device)
    return logits_nV[local, target] - logits_nV.logsumexp(dim=-1)[local]


def _positions(model: PreTrainedModel) -> int:
    """Positions of a tile."""
    return max(1, TILE // model.config.get_text_config(decoder=True).vocab_size)


def _tiles(position_P: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each tile its positions [n] in the row, its pairs, and for each pair the index of its position."""
    positions, index_P = position_P.unique(return_inverse=True)
    order = index_P.argsort(stable=True)
    sorted_P = index_P[order]
    for start in range(0, len(positions), size):
        ends = torch.tensor([start, start + size])
        first, last = torch.searchsorted(sorted_P, ends).tolist()
        yield positions[start : start + size], order[first:last], sorted_P[first:last] - start
