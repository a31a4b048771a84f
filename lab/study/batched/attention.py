"""Attention within a group: prompts attend to themselves, samples to their prompt and themselves.

A prompt is computed and stored once for the samples that continue it. Its keys precede those of all of its
samples, and the queries of all samples attend to all of these keys at once, with a bias of -inf where query
and key belong to different samples. So the keys of a prompt are read once per decode step and not once per
sample. The same function serves sampler and trainer, which differ at most by the order of sums.

On a GPU this is one fused kernel, which stores no scores. Products of queries with the keys of other samples
are wasted: little for completions of some hundred tokens; for thousands they would be most of the work, and
the bias the largest tensor of all. A resumed study must compute the same bits, so gradients are added in a
fixed order (`_Repeatable`), for which the blocks of keys of a head take turns.

Legend: U prompts (of all runs), n samples of each, C queries of a sample, O keys of its own, P tokens of the
longest prompt, K = P + n O keys of a group, H query heads, G key heads, Q query heads that share a key head,
W width of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qerl.kernels.flash import deterministic

_ROW = 8
"""Rows of a bias begin at multiples of this many elements, or the kernel's launcher copies it each time."""


class _Repeatable(torch.autograd.Function):
    """Attention whose gradients have the same bits each time.

    The order in which torch's fused kernels add gradients is a setting of the process, which would also
    refuse operations elsewhere in a step. So it is set for the backward pass of the attention only.
    """

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., torch.Tensor], *qkv: torch.Tensor) -> torch.Tensor:
        needed = zip(qkv, ctx.needs_input_grad[1:], strict=True)
        ctx.own = [x.detach().requires_grad_(has_gradient) for x, has_gradient in needed]
        with torch.enable_grad():
            ctx.out = attend(*ctx.own)
        return ctx.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, out = ctx.own, ctx.out
        del ctx.own, ctx.out  # frees memory after each layer
        with deterministic():
            found = iter(torch.autograd.grad(out, [x for x in own if x.requires_grad], gradients))
        return None, *(next(found) if x.requires_grad else None for x in own)


def attend_prompts(q_UPHW: torch.Tensor, k_UPGW: torch.Tensor, v_UPGW: torch.Tensor) -> torch.Tensor:
    """Causal attention [U, P, H W] of prompts, which are padded behind their last token."""
    q, k, v = (x.transpose(1, 2) for x in (q_UPHW, k_UPGW, v_UPGW))
    # cuDNN's backward pass, which torch would prefer on Hopper, has no fixed order that one could ask for.
    backends = [SDPBackend.FLASH_ATTENTION]
    if not q.is_cuda:
        backends.append(SDPBackend.MATH)
    elif q.dtype == torch.float32:  # which takes no fewer heads of keys than of queries
        backends = [SDPBackend.EFFICIENT_ATTENTION]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    with sdpa_kernel(backends):
        return _Repeatable.apply(attend, q, k, v).transpose(1, 2).flatten(2)


def by_head(x_nOGW: torch.Tensor) -> torch.Tensor:
    """Rearrange keys or values [..., n, O, G, W] of samples to follow their prompt's, [..., G, n O, W]."""
    return x_nOGW.flatten(-4, -3).transpose(-3, -2)


def bias_of(
    hidden_UP: torch.Tensor, hidden_CO: torch.Tensor, samples: int, sharing: int, dtype: torch.dtype
) -> torch.Tensor:
    """Bias that `attend_samples` adds to the scores, [U, 1, Q n C, K]: -inf where a query does not see a key.

    Args:
        hidden_UP: True behind the end of a prompt; U is 1 if that is the same for all.
        hidden_CO: True where a query does not see the sample's own key.
        samples: n.
        sharing: Q.
        dtype: Dtype of the queries.
    """
    (prompts, front), (queries, own) = hidden_UP.shape, hidden_CO.shape
    keys = front + samples * own
    row = -(-keys // _ROW) * _ROW
    bias = torch.zeros(prompts, sharing, samples, queries, row, dtype=dtype, device=hidden_UP.device)
    bias[..., :front].masked_fill_(hidden_UP[:, None, None, None], -torch.inf)
    others_nn = ~torch.eye(samples, dtype=torch.bool, device=hidden_UP.device)
    hidden_nCnO = others_nn[:, None, :, None] | hidden_CO[:, None]
    bias[..., front:keys].unflatten(-1, (samples, own)).masked_fill_(hidden_nCnO, -torch.inf)
    return bias.flatten(1, 3)[:, None, :, :keys]


def attend_samples(
    q_nCHW: torch.Tensor, k_UGKW: torch.Tensor, v_UGKW: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Attention [..., n, C, H W] of samples.

    Args:
        q_nCHW: Queries [..., n, C, H, W]; the axes in front are U.
        k_UGKW, v_UGKW: Keys and values of the prompts, and behind them those of the samples (`by_head`).
        bias: See `bias_of`.
    """
    prompts, groups, _, width = k_UGKW.shape
    q_GQnCW = q_nCHW.unflatten(-2, (groups, -1)).movedim((-3, -2), (-5, -4))
    # Query heads that share a key head are queries of it. Only one fused kernel takes a bias on every GPU and
    # builds no plan per length; no other one is allowed there, or torch might choose one that keeps scores.
    attend = partial(F.scaled_dot_product_attention, attn_mask=bias)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if q_nCHW.is_cuda else SDPBackend.MATH):
        out = _Repeatable.apply(attend, q_GQnCW.reshape(prompts, groups, -1, width), k_UGKW, v_UGKW)
    return out.view(q_GQnCW.shape).movedim((-5, -4), (-3, -2)).flatten(-3)
