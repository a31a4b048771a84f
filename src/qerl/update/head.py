"""A forward pass of a packed row: log-probabilities of chosen tokens and their gradients, without all logits.

A row of L positions has L x V logits, gigabytes for current vocabularies. Here the output head takes a tile
of positions at a time, and of each tile only the results per target are kept. Logits are FP32 and never
rounded (`qerl.kernels.tensors`).

`logps_and_entropies` serves the trainer: one target per position, with entropies. If only hidden states need
a gradient, and none through entropies, the forward pass computes the gradient (onehot - p) W from each row of
logits at once, and backward only scales it: two products with the head's weight. Otherwise backward
recomputes each tile: three products, and one more if the head trains.

`target_logps` and `head_backward` serve `LossDriver`. A position may have any number of targets, so soft
targets, and samples that share a prompt, cost one product with the head per position. Backward recomputes
only positions whose targets have a gradient; prompts, for example, have none.

Legend: L tokens of a row, S positions that are scored, D hidden size, V vocabulary, P pairs of a position and
a target, n positions of a tile.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.parts import layers_with_state
from qerl.kernels.tensors import add_product, head_positions, product
from qerl.update.attention import attention_kwargs
from qerl.update.delta_net import sequence_kwargs
from qerl.update.packed_row import PackedRow, masked_by_branch

T = TypeVar("T")

TILE = 1 << 26
"""Logits per tile: 256 MB in float32, and a multiple of that while their gradient is computed."""


@dataclass(frozen=True)
class Transform:
    """Operations of a model on the head's product, which make logits of it, in this order.

    Attributes:
        scale: Factor of logits.
        cap: Bound of logits by tanh; None for no bound.
        temperature: Divisor of logits.
    """

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, config: Any, temperature: float = 1.0) -> "Transform":
        """Return a model's transform, from the config fields that transformers' families have for it.

        `qerl.update.row_check` refuses a family with another field, since it also runs the model's own code.
        """
        names = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
        given = ((name, getattr(config, name, None)) for name in names)
        name, scale = next(((name, scale) for name, scale in given if scale is not None), ("", 1.0))
        if name == "logits_scaling" and config.model_type != "hyperclovax":
            scale = 1 / scale
        return cls(scale, getattr(config, "final_logit_softcapping", None), temperature)

    def __call__(self, product_nV: torch.Tensor) -> torch.Tensor:
        """Return logits from the head's product; the product itself if no operation applies."""
        z_nV = product_nV if self.scale == 1.0 else product_nV * self.scale
        if self.cap is not None:
            z_nV = self.cap * torch.tanh(z_nV / self.cap)
        return z_nV if self.temperature == 1.0 else z_nV / self.temperature


@dataclass(frozen=True)
class Head:
    """The output head of a model.

    Attributes:
        weight_VD, bias_V: Weight and bias of its product, whose inputs have the weight's dtype and whose
            result is not rounded.
        transform: Operations on the product.
    """

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    transform: Transform = Transform()

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float = 1.0) -> "Head":
        """Return the head of a transformers model; logits are divided by the temperature."""
        linear: Any = model.get_output_embeddings()
        transform = Transform.of(model.config.get_text_config(decoder=True), temperature)
        return cls(linear.weight, linear.bias, transform)

    def product(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """Return the product [n, V], FP32, without a graph."""
        product_nV = product(hidden_nD.to(self.weight_VD.dtype), self.weight_VD.T)
        return product_nV if self.bias_V is None else product_nV + self.bias_V


def logps_and_entropies(
    hidden_SD: torch.Tensor, head: Head, target_S: torch.Tensor, entropy_has_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability [S] of each position's target and entropy [S] in nats, FP32.

    Args:
        hidden_SD: Output of the decoder.
        head: The output head.
        target_S: int64.
        entropy_has_gradient: Whether entropies are differentiated, too.
    """
    if not torch.is_grad_enabled():  # `ctx.needs_input_grad` ignores no_grad
        hidden_SD = hidden_SD.detach()
    return _Logps.apply(
        hidden_SD, head.weight_VD, head.bias_V, target_S, head.transform, entropy_has_gradient
    )


class _Logps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        transform: Transform,
        entropy_has_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, *needs_head = ctx.needs_input_grad[:3]
        ctx.at_once = needs_hidden and not any(needs_head) and not entropy_has_gradient
        ctx.transform = transform
        tiles = _Tiles(hidden_SD, weight_VD, bias_V, target_S, transform, with_gradient=ctx.at_once)
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
            return (gradient_SD * dlogps_S[:, None]).to(ctx.hidden_dtype), *[None] * 5
        hidden_SD, weight_VD, bias_V, target_S = ctx.saved_tensors
        found = [
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip((hidden_SD, weight_VD, bias_V), ctx.needs_input_grad[:3], strict=True)
        ]
        dhidden_SD, dweight_VD, dbias_V = found
        tiles = _Tiles(hidden_SD, weight_VD, bias_V, target_S, ctx.transform, with_gradient=True)
        pulls_2S = torch.stack((dlogps_S, dentropy_S)).float()  # contiguous, unlike the gradients of a sum
        for part in tiles.parts:
            tiles.run(part, (pulls_2S[0, part], pulls_2S[1, part]))
            if dhidden_SD is not None:
                tiles.add_to_hidden(dhidden_SD[part])
            if dweight_VD is not None:
                add_product(dweight_VD, tiles.gradient_nV.T, hidden_SD[part].to(weight_VD.dtype))
            if dbias_V is not None:
                dbias_V += tiles.gradient_nV.sum(0, dtype=torch.float32)
        inputs = (hidden_SD, weight_VD, bias_V)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True)), *[
            None
        ] * 3


class _Tiles:
    """Tiles of whole rows of logits, and the gradient of the head's product.

    Args:
        hidden_SD, weight_VD, bias_V, target_S, transform: As in `logps_and_entropies`.
        with_gradient: Whether `run` writes `gradient_nV`.

    Attributes:
        parts: The positions of each tile.
        gradient_nV: Gradient of the last tile, in the weight's dtype, in the memory of its logits.
    """

    gradient_nV: torch.Tensor

    def __init__(
        self,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        transform: Transform,
        with_gradient: bool,
    ) -> None:
        self._hidden_SD, self._target_S, self._bias_V = hidden_SD, target_S.contiguous(), bias_V
        if weight_VD.dtype.itemsize > 4:
            raise QeRLError("The output head has 64-bit weights; load the model in float32 or in 16 bits.")
        self._transform, self._weight_VD = transform, weight_VD
        positions, vocabulary = len(hidden_SD), len(weight_VD)
        size = max(1, head_positions(positions, vocabulary))  # without positions there are no parts
        self.parts = [slice(start, start + size) for start in range(0, positions, size)]
        self._logits = torch.empty(size, vocabulary, device=hidden_SD.device)
        self._with_gradient = with_gradient

    def run(
        self, part: slice, weights: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies [n]; with `with_gradient`, write their weighted gradient.

        Args:
            part: The positions.
            weights: Gradients [n] of log-probabilities and entropies; None for 1 and 0.
        """
        target_n = self._target_S[part]
        logits_nV, dtype = self._logits[: len(target_n)], self._weight_VD.dtype
        product(self._hidden_SD[part].to(dtype), self._weight_VD.T, out=logits_nV)
        if self._bias_V is not None:
            logits_nV += self._bias_V
        gradient_nV = None
        if self._with_gradient:
            gradient_nV = self.gradient_nV = logits_nV.view(dtype)[:, : logits_nV.shape[1]]
        fold = _fold
        if logits_nV.is_cuda:
            from qerl.kernels.update.token_logps import token_logps as fold
        of = self._transform
        return fold(logits_nV, target_n, of.scale, of.cap, of.temperature, gradient_nV, weights)

    def add_to_hidden(self, total_nD: torch.Tensor) -> None:
        """Add the gradient of the last tile's hidden states to a total."""
        add_product(total_nD, self.gradient_nV, self._weight_VD)


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
    logp_n = logp_nV.gather(1, target_n[:, None])[:, 0]
    logp_nV = logp_nV.masked_fill(p_nV == 0, 0.0)  # a logit may be -inf, and 0 times that is NaN
    entropy_n = -(p_nV * logp_nV).sum(-1)
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
    head: Head, hidden_LD: torch.Tensor, position_P: torch.Tensor, target_P: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability [P] of each target at its position, float32, without a graph.

    Args:
        head: The output head.
        hidden_LD: Output of the decoder for the row.
        position_P, target_P: int64 on the CPU.
    """
    logps_P = torch.empty(len(position_P), device=hidden_LD.device)
    with torch.no_grad():
        for rows_n, pairs, local in _tiles(position_P, _positions(head)):
            product_nV = head.product(hidden_LD[rows_n.to(hidden_LD.device)])
            logps_P[pairs.to(hidden_LD.device)] = _logps(head.transform(product_nV), local, target_P[pairs])
    return logps_P


def head_backward(
    head: Head,
    hidden_LD: torch.Tensor,
    position_P: torch.Tensor,
    target_P: torch.Tensor,
    gradient_P: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient [L, D] of hidden states from the log-probabilities' gradients; if the head trains,
    add its gradient to `.grad`.

    Args:
        head, hidden_LD, position_P, target_P: As in `target_logps`.
        gradient_P: Gradient of a loss with respect to each log-probability, on the CPU; pairs where it is 0
            cost nothing.
    """
    weight_VD, bias_V = head.weight_VD.detach(), head.bias_V
    gradient_LD = torch.zeros_like(hidden_LD, requires_grad=False)
    dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if head.weight_VD.requires_grad else None
    dbias_V = torch.zeros_like(bias_V) if bias_V is not None and bias_V.requires_grad else None
    pulls = gradient_P.nonzero()[:, 0]
    position_P, target_P, gradient_P = position_P[pulls], target_P[pulls], gradient_P[pulls]
    for rows_n, pairs, local in _tiles(position_P, _positions(head)):
        rows_n = rows_n.to(hidden_LD.device)
        hidden_nD = hidden_LD[rows_n].detach()
        with torch.no_grad():
            product_nV = head.product(hidden_nD)
        with torch.enable_grad():
            logps = _logps(head.transform(product_nV.requires_grad_()), local, target_P[pairs])
        (dproduct_nV,) = torch.autograd.grad(logps, product_nV, gradient_P[pairs].to(logps))
        rounded_nV = dproduct_nV.to(weight_VD.dtype)
        gradient_LD[rows_n] = product(rounded_nV, weight_VD).to(hidden_LD.dtype)
        if dweight_VD is not None:
            add_product(dweight_VD, rounded_nV.T, hidden_nD.to(weight_VD.dtype))
        if dbias_V is not None:
            dbias_V += dproduct_nV.sum(0)
    for parameter, found in ((head.weight_VD, dweight_VD), (bias_V, dbias_V)):
        if parameter is not None and found is not None:
            parameter.backward(found.to(parameter.dtype))
    return gradient_LD


def _logps(logits_nV: torch.Tensor, local: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    device = logits_nV.device
    local, target = local.to(device), target.to(device)
    return logits_nV[local, target] - logits_nV.logsumexp(dim=-1)[local]


def _positions(head: Head) -> int:
    """Return the number of positions per tile."""
    return max(1, TILE // len(head.weight_VD))


def _tiles(position_P: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for each tile its positions [n] in the row, the indices of its pairs, and for each pair the index
    of its position within the tile."""
    positions, index_P = position_P.unique(return_inverse=True)
    order = index_P.argsort(stable=True)
    sorted_P = index_P[order]
    for start in range(0, len(positions), size):
        ends = torch.tensor([start, start + size])
        first, last = torch.searchsorted(sorted_P, ends).tolist()
        yield positions[start : start + size], order[first:last], sorted_P[first:last] - start


def hidden_states(decoder: torch.nn.Module, row: PackedRow, by_segment: bool) -> torch.Tensor:
    """Return the hidden states [L, D] of a row, the input of the output head.

    Args:
        decoder: The model without its output head.
        row: The packed row.
        by_segment: Whether the model's attention reads segments instead of a dense mask.

    Raises:
        QeRLError: The model's attention implementation makes no masks that a row could use.
    """
    segments = contextlib.nullcontext(attention_kwargs(row.branches)) if by_segment else None
    with segments or masked_by_branch(decoder.config, row) as attention:
        out = decoder(
            input_ids=row.input_ids_1L,
            position_ids=row.position_ids_1L,
            use_cache=False,
            **attention,
            **(sequence_kwargs(decoder, row) if any(layers_with_state(decoder.config)) else {}),
            **({} if row.choices_LMC is None else {"choices": row.choices_LMC}),
        )
    hidden_1LD: torch.Tensor = out.last_hidden_state
    return hidden_1LD[0]


def run_row(
    model: torch.nn.Module,
    base: PreTrainedModel,
    row: PackedRow,
    by_segment: bool,
    of_hidden: Callable[[torch.Tensor], T],
) -> T:
    """Apply a function to the hidden states [S, D] of a row's scored positions.

    Args:
        model: The transformers model as it trains, with or without wrappers of PEFT and of several processes.
            The wrappers see a forward pass, since gradients are averaged over processes only after one.
        base: The transformers model inside `model`.
        row, by_segment: As in `hidden_states`.
        of_hidden: The function.
    """

    def forward(*_: Any, **__: Any) -> T:
        return of_hidden(hidden_states(base.base_model, row, by_segment)[row.scored_S])

    own = vars(base).get("forward")
    vars(base)["forward"] = forward
    try:
        found: T = model(input_ids=row.input_ids_1L)
    finally:
        if own is None:
            del vars(base)["forward"]
        else:
            vars(base)["forward"] = own
    return found


def score(
    model: torch.nn.Module,
    base: PreTrainedModel,
    row: PackedRow,
    by_segment: bool,
    temperature: float = 1.0,
    entropy_has_gradient: bool = False,
    logps_have_gradient: bool = True,
    divergence: Callable[[torch.Tensor, Head], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return for each label of a row its log-probability, the entropy of its distribution in nats and, with
    `divergence`, the distribution's divergence from another one, [S] each.

    Args:
        model, base, row, by_segment: As in `run_row`.
        temperature: Divides logits.
        entropy_has_gradient: Whether entropies are differentiated, too.
        logps_have_gradient: False if only the divergence is differentiated, which saves a product with the
            head.
        divergence: Computes the divergence from hidden states and the head (`qerl.update.distillation`).
    """

    def of_hidden(hidden_SD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head, labels_S = Head.of(base, temperature), row.labels_1L[0, row.scored_S]
        pulled_SD = hidden_SD if logps_have_gradient or entropy_has_gradient else hidden_SD.detach()
        found = logps_and_entropies(pulled_SD, head, labels_S, entropy_has_gradient)
        return found if divergence is None else (*found, divergence(hidden_SD, head))

    return run_row(model, base, row, by_segment, of_hidden)
