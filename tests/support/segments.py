"""The kernels of `qerl.kernels.flash` by their definition: each segment by itself, dense, in FP64.

Backward is that of FlashAttention: it makes weights of the scores and of the logarithms that it is given, and
subtracts from the gradient of each weight the product of the output that it is given with its gradient.
"""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from qerl.kernels import flash
from qerl.kernels.flash import Extents, Scoring


def use_dense_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention of packed rows run here, without a GPU."""
    monkeypatch.setattr(flash, "forward", forward)
    monkeypatch.setattr(flash, "backward", backward)


def forward(
    q_LHE: torch.Tensor, k_MGE: torch.Tensor, v_MGE: torch.Tensor, extents: Extents, scoring: Scoring
) -> tuple[torch.Tensor, ...]:
    """The output [L, H, E], and the logarithms [H, L] of the softmax's sums."""
    outs, logarithms = [], []
    for _, _, (*_, v), scores_HLM in _segments((q_LHE, k_MGE, v_MGE), extents, scoring):
        logarithms.append(scores_HLM.logsumexp(-1))
        outs.append(torch.einsum("hlm,mhe->lhe", scores_HLM.softmax(-1), v).to(q_LHE.dtype))
    return torch.cat(outs), torch.cat(logarithms, dim=1)


def backward(
    dout_LHE: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, ...],
    extents: Extents,
    scoring: Scoring,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v."""
    gradients = [torch.zeros_like(x) for x in inputs]
    out_LHE, lse_HL = outputs
    group = inputs[0].shape[1] // inputs[1].shape[1]
    for queries, keys, (q, k, v), scores_HLM in _segments(inputs, extents, scoring):
        dout, out = dout_LHE[queries].double(), out_LHE[queries].double()
        weights_HLM = (scores_HLM - lse_HL[:, queries, None]).exp()
        of_weights_HLM = torch.einsum("lhe,mhe->hlm", dout, v) - (dout * out).sum(-1).T[..., None]
        of_scores_HLM = weights_HLM * of_weights_HLM * scoring.scale
        found = (
            torch.einsum("hlm,mhe->lhe", of_scores_HLM, k),
            torch.einsum("hlm,lhe->mhe", of_scores_HLM, q),
            torch.einsum("hlm,lhe->mhe", weights_HLM, dout),
        )
        gradients[0][queries] = found[0].to(dout_LHE.dtype)
        for gradient_MGE, wide_MHE in zip(gradients[1:], found[1:], strict=True):
            gradient_MGE[keys] = wide_MHE.unflatten(1, (-1, group)).sum(2).to(dout_LHE.dtype)
    return tuple(gradients)


def _segments(
    inputs: tuple[torch.Tensor, ...], extents: Extents, scoring: Scoring
) -> Iterator[tuple[slice, slice, tuple[torch.Tensor, ...], torch.Tensor]]:
    """Queries and keys of each segment, its q, k and v for each query head, and its scores."""
    group = inputs[0].shape[1] // inputs[1].shape[1]
    ends = (pairwise(offsets.tolist()) for offsets in extents[:2])
    for queries, keys in (tuple(slice(*pair) for pair in pairs) for pairs in zip(*ends, strict=True)):
        q = inputs[0][queries].double()
        k, v = (x[keys].double().repeat_interleave(group, dim=1) for x in inputs[1:])
        scores_HLM = torch.einsum("lhe,mhe->hlm", q, k) * scoring.scale
        key = torch.arange(len(k), device=q.device)
        query = key[len(k) - len(q) :, None]
        seen = key <= query
        if scoring.window is not None:
            seen &= key > query - scoring.window
        yield queries, keys, (q, k, v), scores_HLM.masked_fill(~seen, -torch.inf)
