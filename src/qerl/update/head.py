"""Log-probabilities of chosen tokens and their gradients, without the logits of a whole row.

A row of L positions has L x V logits, gigabytes for the vocabularies of today. Here positions go through the
output head some at a time; of each tile only the log-probabilities of the targets are kept. Logits are FP32
and never rounded (`qerl.kernels.logits`).

`logps_and_entropies` is the trainer's: one target a position, with entropies. Where hidden states alone have
a gradient and entropies have none, the gradient of a log-probability is known as soon as its row of logits
is, (onehot - p) W, and the loss only multiplies it by a number: two products with the head's weight.
Elsewhere backward computes each tile again: three products, and one more where the head trains.

`target_logps` and `head_backward` are `LossDriver`'s. Any number of targets stands at a position, so soft
targets, and samples that share a prompt, cost one product with the head per position; and tiles are computed
again with those positions alone whose targets pull at anything: in a batch of samples with prompts, prompts
do not. From hidden states to logits a model may scale, cap or add; each family has its own names for it. So
there the model's own forward pass is run with its decoder replaced by the hidden states of the tile.

Legend: L tokens of a row, S positions that are scored, D hidden size, V vocabulary, P pairs of a position and
a target, n positions of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from qerl.kernels.limits import head_positions
from qerl.kernels.logits import add_product, product, unrounded_logits

PART = 32768
"""Rows of a head in another dtype than its product that are converted at a time."""

TILE = 1 << 26
"""Logits of a tile: 256 MB in float32, and some times that while their gradient is computed."""


@dataclass(frozen=True)
class Transform:
    """What a model does to logits after the head's product, in this order.

    Attributes:
        scale: Multiplies them.
        cap: Bounds them by tanh; None for no bound.
        temperature: Divides them.
    """

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0


def logps_and_entropies(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_S: torch.Tensor,
    transform: Transform,
    dtype: torch.dtype,
    entropy_has_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability [S] of each position's target and entropy [S] in nats, FP32.

    Args:
        hidden_SD: What the decoder gave.
        weight_VD, bias_V: The output head.
        target_S: int64.
        transform: What happens to its product.
        dtype: In which the head and the gradient of logits are multiplied.
        entropy_has_gradient: Whether entropies are differentiated, too.
    """
    if not torch.is_grad_enabled():  # a function of autograd is not told
        hidden_SD = hidden_SD.detach()
    return _Logps.apply(hidden_SD, weight_VD, bias_V, target_S, transform, dtype, entropy_has_gradient)


class _Logps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        transform: Transform,
        dtype: torch.dtype,
        entropy_has_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, *needs_head = ctx.needs_input_grad[:3]
        ctx.at_once = needs_hidden and not any(needs_head) and not entropy_has_gradient
        ctx.transform, ctx.dtype = transform, dtype
        tiles = _Tiles(hidden_SD, weight_VD, bias_V, target_S, transform, dtype, with_gradient=ctx.at_once)
        logps_S, entropy_S = (torch.empty(len(hidden_SD), device=hidden_SD.device) for _ in range(2))
        # FP32, because the loss's gradient is multiplied in before anything is rounded.
        gradient_SD = torch.zeros_like(hidden_SD, dtype=torch.float32) if ctx.at_once else None
        for part in tiles.parts:
            logps_S[part], entropy_S[part] = tiles.run(part)
            if gradient_SD is not None:
                tiles.add_to_hidden(gradient_SD[part])
        if ctx.at_once:
            ctx.save_for_backward(gradient_SD)
            ctx.hidden_dtype = hidden_SD.dtype
        else:
            ctx.save_for_backward(hidden_SD, weight_VD, bias_V, target_S)
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_S)
        return logps_S, entropy_S

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogps_S: torch.Tensor, dentropy_S: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.at_once:
            (gradient_SD,) = ctx.saved_tensors
            return (gradient_SD * dlogps_S[:, None]).to(ctx.hidden_dtype), *[None] * 6
        hidden_SD, weight_VD, bias_V, target_S = ctx.saved_tensors
        found = [
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip((hidden_SD, weight_VD, bias_V), ctx.needs_input_grad[:3], strict=True)
        ]
        dhidden_SD, dweight_VD, dbias_V = found
        tiles = _Tiles(hidden_SD, weight_VD, bias_V, target_S, ctx.transform, ctx.dtype, with_gradient=True)
        for part in tiles.parts:
            tiles.run(part, (dlogps_S[part].float(), dentropy_S[part].float()))
            if dhidden_SD is not None:
                tiles.add_to_hidden(dhidden_SD[part])
            if dweight_VD is not None:
                add_product(dweight_VD, tiles.gradient_nV.T, hidden_SD[part].to(ctx.dtype))
            if dbias_V is not None:
                dbias_V += tiles.gradient_nV.sum(0, dtype=torch.float32)
        inputs = (hidden_SD, weight_VD, bias_V)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True)), *[
            None
        ] * 4


class _Tiles:
    """Whole rows of logits of some positions at a time, and the gradient of the head's product.

    Args:
        hidden_SD, weight_VD, bias_V, target_S, transform, dtype: As in `logps_and_entropies`.
        with_gradient: Whether `run` writes `gradient_nV`.

    Attributes:
        parts: The positions of each tile.
        gradient_nV: Of the last tile, in the dtype of products, in the place of its logits.
    """

    gradient_nV: torch.Tensor

    def __init__(
        self,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        transform: Transform,
        dtype: torch.dtype,
        with_gradient: bool,
    ) -> None:
        self._hidden_SD, self._target_S, self._bias_V = hidden_SD, target_S, bias_V
        self._transform, self._dtype = transform, dtype
        # A head of another dtype is converted a part at a time: a copy of all of it may take gigabytes.
        rows = len(weight_VD) if weight_VD.dtype == dtype else PART
        self._weights = weight_VD.split(rows)
        self._columns = [slice(start, start + rows) for start in range(0, len(weight_VD), rows)]
        positions, vocabulary = len(hidden_SD), len(weight_VD)
        size = head_positions(positions, vocabulary)
        self.parts = [slice(start, start + size) for start in range(0, positions, size)]
        self._logits = torch.empty(size, vocabulary, device=hidden_SD.device)
        self._with_gradient = with_gradient

    def run(
        self, part: slice, weights: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [n]; writes the gradient of these, weighted, where it is wanted.

        Args:
            part: The positions.
            weights: Gradients [n] of log-probabilities and entropies; None for 1 and 0.
        """
        target_n = self._target_S[part]
        logits_nV, hidden_nD = self._logits[: len(target_n)], self._hidden_SD[part].to(self._dtype)
        for columns, weight_VD in zip(self._columns, self._weights, strict=True):
            product(hidden_nD, weight_VD.to(self._dtype).T, out=logits_nV[:, columns])
        if self._bias_V is not None:
            logits_nV += self._bias_V
        gradient_nV = None
        if self._with_gradient:
            gradient_nV = self.gradient_nV = logits_nV.view(self._dtype)[:, : logits_nV.shape[1]]
        fold = _fold
        if logits_nV.is_cuda:
            from qerl.kernels.update.token_logps import token_logps as fold
        of = self._transform
        return fold(logits_nV, target_n, of.scale, of.cap, of.temperature, gradient_nV, weights)

    def add_to_hidden(self, total_nD: torch.Tensor) -> None:
        """Add the gradient of the last tile's hidden states."""
        for columns, weight_VD in zip(self._columns, self._weights, strict=True):
            add_product(total_nD, self.gradient_nV[:, columns], weight_VD.to(self._dtype))


def _fold(
    logits_nV: torch.Tensor,
    target_n: torch.Tensor,
    scale: float,
    cap: float | None,
    temperature: float,
    gradient_nV: torch.Tensor | None = None,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`qerl.kernels.update.token_logps.token_logps` in torch."""
    z_nV = logits_nV * scale
    if cap is not None:
        z_nV = cap * torch.tanh(z_nV / cap)
    logp_nV = (z_nV / temperature).log_softmax(-1)
    p_nV = logp_nV.exp()
    logp_n, entropy_n = logp_nV.gather(1, target_n[:, None])[:, 0], -(p_nV * logp_nV).sum(-1)
    if gradient_nV is not None:
        dlogp_n, dentropy_n = (torch.ones_like(logp_n), None) if weights is None else weights
        if dentropy_n is not None:
            along_nV = p_nV * (logp_nV + entropy_n[:, None]) * -dentropy_n[:, None]
        else:
            along_nV = torch.zeros_like(p_nV)
        along_nV -= p_nV * dlogp_n[:, None]
        along_nV.scatter_add_(1, target_n[:, None], dlogp_n[:, None])
        if cap is not None:
            along_nV *= 1 - (z_nV / cap) ** 2
        gradient_nV.copy_(along_nV * (scale / temperature))
    return logp_n, entropy_n


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
        ids = torch.zeros(1, len(hidden_nD), dtype=torch.long, device=hidden_nD.device)
        with unrounded_logits(model):
            out = model(input_ids=ids)
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
