"""TRL's chunked output head with two products instead of three, and without a wait. Tied to trl 1.16.

TRL's head computes logits in tiles, keeps their statistics, and computes every tile again for backward: three
products with the head's weight. But the gradient of a log-probability with respect to its hidden state is
known as soon as the row of logits is, (onehot - p) W, and the loss only multiplies it by a number. So where
hidden states alone have a gradient and entropies have none, whole rows of logits are computed, turned into
that gradient in place, and multiplied with W at once; backward scales. TRL's own kernels do the rest, as they
do where its function is kept: without a graph, where the head trains or has another dtype than the product,
and where the loss has an entropy term.

Around its function, TRL selects the positions that have a label, which waits for the GPU to say how many. In
a joined row all positions have one (`update.forward.scored_only`), so inside the block every position is
scored, as TRL does on devices without Triton.

Legend: S positions, V vocabulary, D hidden size, n positions of a tile.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from trl.kernels import chunked_logprob as trl_head
from trl.trainer import utils as trl_utils

from qerl.kernels.limits import head_positions


@contextlib.contextmanager
def all_positions_scored(entropy_has_gradient: bool) -> Iterator[None]:
    """Inside the block TRL's head takes every position for one with a label, and two products where it can.

    Args:
        entropy_has_gradient: Whether the loss has a term of entropies.
    """
    before = trl_utils._use_triton, trl_utils._ChunkedLogProbFunction
    trl_utils._use_triton = lambda _: False  # it decides there whether positions are selected
    if not entropy_has_gradient:
        trl_utils._ChunkedLogProbFunction = _Head
    try:
        yield
    finally:
        trl_utils._use_triton, trl_utils._ChunkedLogProbFunction = before


class _Head:
    """Stands for TRL's function of autograd."""

    @staticmethod
    def apply(
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        trained = weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)
        whole_rows = torch.is_grad_enabled() and hidden_SD.requires_grad and not trained
        # TRL's head rounds a part of the weight at a time, where here a copy of all of it would be needed.
        whole_rows = whole_rows and weight_VD.dtype == _product_dtype(hidden_SD)
        if not whole_rows or set(outputs) - {"log_probs", "entropy"}:
            return trl_head.ChunkedLogProbFunction.apply(
                *(hidden_SD, weight_VD, bias_V, target_S),
                *(temperature, chunk_size, softcap, logit_scale, outputs),
            )
        transform = {
            "logit_scale": logit_scale,
            "softcap": softcap or 1.0,
            "inv_t": 1 / temperature,
            "HAS_SOFTCAP": softcap is not None,
        }
        logps_S, entropy_S = _TwoProducts.apply(hidden_SD, weight_VD, bias_V, target_S, transform)
        return logps_S, entropy_S if "entropy" in outputs else None, None, None, None


def _product_dtype(hidden_SD: torch.Tensor) -> torch.dtype:
    """The dtype in which TRL's head multiplies."""
    kind = hidden_SD.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_SD.dtype


class _TwoProducts(torch.autograd.Function):
    """Log-probability and entropy of each position, FP32; entropies have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        transform: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device, (positions, width), vocabulary = hidden_SD.device, hidden_SD.shape, len(weight_VD)
        dtype = weight_VD.dtype
        size = head_positions(positions, vocabulary)
        logits_nV = torch.empty(size, vocabulary, dtype=dtype, device=device)
        logps_S, entropy_S = (torch.empty(positions, device=device) for _ in range(2))
        # FP32 as in TRL's backward: the loss's gradient is multiplied in before anything is rounded.
        gradient_SD = torch.zeros(positions, width, device=device)
        for start in range(0, positions, size):
            part = slice(start, start + size)
            tile_nV = logits_nV[: len(target_S[part])]
            torch.mm(hidden_SD[part].to(dtype), weight_VD.T, out=tile_nV)
            if bias_V is not None:
                tile_nV += bias_V.to(dtype)
            logps_S[part], entropy_S[part] = _to_gradient(tile_nV, target_S[part], transform)
            trl_head._addmm_fp32(gradient_SD[part], tile_nV, weight_VD)
        ctx.save_for_backward(gradient_SD)
        ctx.dtype = hidden_SD.dtype
        ctx.mark_non_differentiable(entropy_S)
        return logps_S, entropy_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogps_S: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient_SD,) = ctx.saved_tensors
        return (gradient_SD * dlogps_S[:, None]).to(ctx.dtype), None, None, None, None


def _to_gradient(
    tile_nV: torch.Tensor, target_n: torch.Tensor, transform: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits into the gradient of each target's log-probability, in place.

    Returns:
        Log-probabilities and entropies of the positions.
    """
    (n, vocabulary), on_gpu = tile_nV.shape, trl_head._use_triton(tile_nV.device)
    zeros = partial(torch.zeros, n, device=tile_nV.device)
    highest, total, weighted, target_logit, unread = zeros() - torch.inf, zeros(), zeros(), zeros(), zeros()
    # One program reads a whole row: with TRL's 1024 logits at a time it waits for memory at each.
    fold = partial(trl_head._forward_kernel[(n,)], num_warps=8) if on_gpu else trl_head._forward_tile
    fold(
        *(tile_nV, tile_nV.stride(0), target_n, highest, total, weighted, unread, unread, unread),
        *(target_logit, 0, vocabulary),
        **transform,
        HAS_ENTROPY=True,
        HAS_LOG_SUM_SQ_PROBS=False,
        HAS_MEAN_LOGITS=False,
        HAS_IS_TOP1=False,
        BLOCK_SIZE=4 * trl_head._BLOCK_SIZE,
    )
    log_z = highest + total.log()
    blocks = -(-vocabulary // trl_head._BLOCK_SIZE)
    fold = trl_head._backward_kernel[(n, blocks)] if on_gpu else trl_head._backward_tile
    fold(
        *(tile_nV, tile_nV.stride(0), target_n, log_z, unread, torch.ones_like(log_z), unread),
        *(0, vocabulary),
        **transform,
        HAS_LOGPROB_GRAD=True,
        HAS_ENTROPY_GRAD=False,
        BLOCK_SIZE=trl_head._BLOCK_SIZE,
    )
    return target_logit - log_z, log_z - weighted / total
