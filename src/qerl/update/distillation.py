"""Divergence of a policy from a teacher over the whole vocabulary, without holding all logits.

With p the policy's distribution at a position, q the teacher's and m = a q + (1 - a) p, the divergence is the
generalised Jensen-Shannon divergence of GKD (Agarwal et al., arXiv 2306.13649, equation 1):

    D = a KL(q || m) + (1 - a) KL(p || m)        for 0 < a < 1
    D = KL(q || p)                               for a = 0, the forward KL
    D = KL(p || q)                               for a = 1, the reverse KL (MiniLLM, arXiv 2306.08543)

At a = 0 and a = 1, D is the KL divergence itself and not the limit of the first line, which is 0; TRL's
`DistillationTrainer` has the same three cases. With z the policy's logits the gradient is

    dD/dz = p (g - sum p g),    g = (1 - a) log(p / m);    for a = 1: log(p / q);    for a = 0: dD/dz = p - q

so the gradient of a position needs only its own rows of logits. As in `qerl.update.head`, both heads take a
tile of positions at a time, with whole rows of logits in FP32. If only hidden states need a gradient, the
forward pass computes it from each tile, and backward only scales it: three products with a head, one of them
with the teacher's. If the head trains, backward recomputes each tile.

The divergence covers the whole vocabulary and not the teacher's top k tokens: a head's product has to be
computed for either, and the passes over rows of logits that top-k saves are cheap beside it. Top-k would bias
the reverse KL, whose gradient is large where the policy's probability is high and the teacher's is low.

Given up: `qerl.update.head` computes the policy's product again for log-probabilities and entropies, one
product more than a joint function would need. The two would share no other line.

Legend: S positions that are scored, D hidden size, E that of the teacher, V vocabulary, n positions of a
tile.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from qerl.kernels.tensors import add_product, divergence_positions
from qerl.update.head import Head


@dataclass(frozen=True)
class Target:
    """The teacher's side of a divergence, for the positions of a row.

    Attributes:
        hidden_SE: Output of its decoder, without a graph.
        head: Its output head, over the policy's vocabulary.
        alpha: a, from 0 to 1.
    """

    hidden_SE: torch.Tensor
    head: Head
    alpha: float = 1.0


def divergence(hidden_SD: torch.Tensor, head: Head, target: Target) -> torch.Tensor:
    """Return the divergence D [S] in nats of each position, FP32, with gradients for hidden states and head.

    Args:
        hidden_SD: Output of the policy's decoder.
        head: Its output head.
        target: The teacher's side.
    """
    if not torch.is_grad_enabled():  # `ctx.needs_input_grad` ignores no_grad
        hidden_SD = hidden_SD.detach()
    found: torch.Tensor = _Divergence.apply(hidden_SD, head.weight_VD, head.bias_V, head.transform, target)
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        transform: Any,
        target: Target,
    ) -> torch.Tensor:
        needs_hidden, *needs_head = ctx.needs_input_grad[:3]
        ctx.at_once = needs_hidden and not any(needs_head)
        head = Head(weight_VD, bias_V, transform)
        value_S = torch.empty(len(hidden_SD), device=hidden_SD.device)
        # FP32, because the loss's gradient is multiplied in before anything is rounded.
        gradient_SD = torch.zeros_like(hidden_SD, dtype=torch.float32) if ctx.at_once else None
        for part in _parts(hidden_SD, weight_VD):
            value_S[part], gradient_nV = _tile(hidden_SD[part], head, target, part, ctx.at_once)
            if gradient_SD is not None and gradient_nV is not None:
                add_product(gradient_SD[part], gradient_nV.to(weight_VD.dtype), weight_VD)
            del gradient_nV
        if ctx.at_once:
            ctx.save_for_backward(gradient_SD)
            ctx.hidden_dtype = hidden_SD.dtype
        else:
            ctx.save_for_backward(hidden_SD, weight_VD, bias_V)
            ctx.transform, ctx.target = transform, target
        return value_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dvalue_S: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.at_once:
            (gradient_SD,) = ctx.saved_tensors
            return (gradient_SD * dvalue_S[:, None]).to(ctx.hidden_dtype), *[None] * 4
        hidden_SD, weight_VD, bias_V = inputs = ctx.saved_tensors
        found = [
            torch.zeros_like(x, dtype=torch.float32) if needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        dhidden_SD, dweight_VD, dbias_V = found
        head = Head(weight_VD, bias_V, ctx.transform)
        for part in _parts(hidden_SD, weight_VD):
            _, gradient_nV = _tile(hidden_SD[part], head, ctx.target, part, True)
            assert gradient_nV is not None
            gradient_nV *= dvalue_S[part, None]
            if dbias_V is not None:
                dbias_V += gradient_nV.sum(0)
            rounded_nV = gradient_nV.to(weight_VD.dtype)
            if dhidden_SD is not None:
                add_product(dhidden_SD[part], rounded_nV, weight_VD)
            if dweight_VD is not None:
                add_product(dweight_VD, rounded_nV.T, hidden_SD[part].to(weight_VD.dtype))
        return *(None if g is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True)), None, None


def _parts(hidden_SD: torch.Tensor, weight_VD: torch.Tensor) -> list[slice]:
    """The positions of each tile."""
    size = divergence_positions(len(hidden_SD), len(weight_VD))
    return [slice(start, start + size) for start in range(0, len(hidden_SD), size)]


def _tile(
    hidden_nD: torch.Tensor, head: Head, target: Target, part: slice, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """D [n], and its gradient [n, V] with respect to the product of the policy's head."""
    of, alpha = head.transform, target.alpha
    product_nV = head.product(hidden_nD)
    log_p_nV = of(product_nV).log_softmax(-1)
    log_q_nV = target.head.transform(target.head.product(target.hidden_SE[part])).log_softmax(-1)
    if of.cap is None:
        del product_nV
    p_nV = log_p_nV.exp()
    along_nV = None
    if alpha == 0:
        q_nV = log_q_nV.exp()
        value_n = _mean(q_nV, log_q_nV - log_p_nV)
        if with_gradient:
            along_nV = p_nV.sub_(q_nV)
    else:
        log_m_nV = log_q_nV
        if alpha < 1:
            log_m_nV = torch.logaddexp(log_q_nV + math.log(alpha), log_p_nV + math.log(1 - alpha))
        gap_nV = log_p_nV.sub_(log_m_nV).masked_fill_(p_nV == 0, 0.0)
        policy_n = (p_nV * gap_nV).sum(-1)
        value_n, share = policy_n, 1.0
        if alpha < 1:
            share = 1 - alpha
            value_n = alpha * _mean(log_q_nV.exp(), log_q_nV - log_m_nV) + share * policy_n
        if with_gradient:
            along_nV = gap_nV.sub_(policy_n[:, None]).mul_(p_nV).mul_(share)
    if along_nV is not None:
        if of.cap is not None:
            along_nV *= 1 - torch.tanh(product_nV * of.scale / of.cap) ** 2
        along_nV *= of.scale / of.temperature
    return value_n, along_nV


def _mean(weight_nV: torch.Tensor, values_nV: torch.Tensor) -> torch.Tensor:
    """Return the mean [n] of values under a distribution; values of probability 0 may be infinite."""
    return (weight_nV * values_nV.masked_fill_(weight_nV == 0, 0.0)).sum(-1)
