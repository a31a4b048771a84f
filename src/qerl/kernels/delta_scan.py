"""The pass over the chunks of a gated delta rule, in torch; `delta_kernels` computes the same on a GPU.

Within a chunk (`qerl.kernels.delta_rule`) G are the sums of decays up to each token, inclusive. With the
state H before the chunk, and M and P, which are computed beforehand for all chunks at once,

    R = v - exp(G) (k H)            # the part of v that H lacks: `missing`
    X = M R                         # the values that the tokens write: `written`
    o = exp(G) (q H) + P X
    H' = exp(G_last) H + k^T (exp(G_last - G) X)

Only this is sequential. H' is the state after the chunk and before the next one. Other formulations multiply
M with k and v beforehand, which saves the second of three products here; but then two matrices [tokens, K]
and [tokens, E] are written and read per chunk and value head, instead of M with [tokens, tokens], and v as
given.

Gradients run from the last chunk to the first. With dH' the gradient of the state after the chunk,

    dX = P^T do + exp(G_last - G) (k dH')
    dR = M^T dX                     # the gradient of v as well
    dH = exp(G_last) dH' + q^T (exp(G) do) - k^T (exp(G) dR)

and the gradients of q, k, G, M and P are products within each chunk, once all H, R, X and their gradients are
known (`delta_rule`).

Shapes: L tokens of all sequences, N sequences, J chunks of all sequences in order, I tokens of a chunk, U key
heads of size K, V value heads of size E.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from qerl.kernels.tensors import upload

CHUNK = 64
"""I, tokens per chunk."""


@dataclass(frozen=True)
class Chunks:
    """Positions of the chunks of packed sequences.

    Attributes:
        first: First chunk of each sequence, then J: N + 1 numbers.
        first_N: The same, int32.
        rows_JI: int64, the token at each place; places after the end of a sequence repeat its last token.
        real_JI: bool, False at those places.
        place_L: int64, the place of each token, I j + i.
    """

    first: list[int]
    first_N: torch.Tensor
    rows_JI: torch.Tensor
    real_JI: torch.Tensor
    place_L: torch.Tensor

    @classmethod
    def of(cls, offsets: Sequence[int], device: torch.device) -> "Chunks":
        """Return the chunks of sequences that begin at these tokens of a row; the last number is L."""
        begins, ends = np.array(offsets[:-1]), np.array(offsets[1:])
        counts = -(-(ends - begins) // CHUNK)
        first = np.cumsum([0, *counts])
        of_J = np.repeat(np.arange(len(counts)), counts)
        row_J = begins[of_J] + CHUNK * (np.arange(first[-1]) - first[of_J])
        rows_JI = row_J[:, None] + np.arange(CHUNK)
        real_JI = rows_JI < ends[of_J][:, None]
        rows_JI = np.minimum(rows_JI, ends[of_J][:, None] - 1)
        on_host = first.astype(np.int32), rows_JI, real_JI, np.flatnonzero(real_JI)
        return cls(first.tolist(), *(upload(torch.from_numpy(x), device) for x in on_host))

    def split(self, x_L: torch.Tensor) -> torch.Tensor:
        """Split per-token values into chunks, [J, I, ...]; a place without a token repeats the sequence's
        last one."""
        return x_L[self.rows_JI]

    def join(self, x_JI: torch.Tensor) -> torch.Tensor:
        """Return the values of all tokens, [L, ...], from those of their places."""
        return x_JI.flatten(0, 1)[self.place_L]


class Local(NamedTuple):
    """Tensors of each chunk that a pass reads besides v, contiguous, in FP32 (or FP64, in torch).

    Attributes:
        q_JUIK: Unit vectors over sqrt(K).
        k_JUIK: Unit vectors.
        sums_JVI: G.
        mix_JVII: M, zero above the diagonal.
        scores_JVII: P, zero above the diagonal.
    """

    q_JUIK: torch.Tensor
    k_JUIK: torch.Tensor
    sums_JVI: torch.Tensor
    mix_JVII: torch.Tensor
    scores_JVII: torch.Tensor


class Kept(NamedTuple):
    """H before each chunk, R and X, in the dtype of `Local`."""

    states_JVKE: torch.Tensor
    missing_JVIE: torch.Tensor
    written_JVIE: torch.Tensor


class Pulls(NamedTuple):
    """Gradients of the states after chunks, of R, of X and of the initial states, in the dtype of `Local`."""

    behind_JVKE: torch.Tensor
    missing_JVIE: torch.Tensor
    written_JVIE: torch.Tensor
    initial_NVKE: torch.Tensor


def inverse(system_JVII: torch.Tensor) -> torch.Tensor:
    """Invert unit lower triangular matrices, given their part below the diagonal; the rest is not read."""
    one = torch.eye(system_JVII.shape[-1], dtype=system_JVII.dtype, device=system_JVII.device)
    return torch.linalg.solve_triangular(system_JVII, one, upper=False, unitriangular=True)


def scan(
    local: Local, v_JIVE: torch.Tensor, initial_NVKE: torch.Tensor | None, chunks: Chunks, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
    """Run the pass over all chunks.

    Args:
        local: Tensors of the chunks.
        v_JIVE: In any floating dtype.
        initial_NVKE: In the dtype of `Local`, contiguous; None for zeros.
        chunks: Positions of the chunks.
        keep: Whether to return `Kept`.

    Returns:
        Outputs [J, I, V, E] in the dtype of v, the state [N, V, K, E] after each sequence in that of `Local`,
        and `Kept`, which the gradients need, or None.
    """
    q, k, grown, left, whole = _factors(local, v_JIVE.shape[2])
    v = v_JIVE.movedim(1, 2).to(k.dtype)
    outs, finals, kept = [], [], []
    for n, (first, last) in enumerate(pairwise(chunks.first)):
        state = k.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
        state = state if initial_NVKE is None else initial_NVKE[n]
        for j in range(first, last):
            missing = v[j] - grown[j] * (k[j] @ state)
            written = local.mix_JVII[j] @ missing
            outs.append(grown[j] * (q[j] @ state) + local.scores_JVII[j] @ written)
            kept.append((state, missing, written))
            state = whole[j] * state + k[j].mT @ (left[j] * written)
        finals.append(state)
    out_JIVE = torch.stack(outs).movedim(1, 2).to(v_JIVE.dtype)
    return out_JIVE, torch.stack(finals), Kept(*map(torch.stack, zip(*kept, strict=True))) if keep else None


def scan_backward(
    local: Local, dout_JIVE: torch.Tensor, dfinal_NVKE: torch.Tensor | None, chunks: Chunks
) -> Pulls:
    """Return the gradients, from those of the outputs and of the states after the sequences.

    Args:
        local: Tensors of the chunks.
        dout_JIVE: In any floating dtype, zeros where a chunk has no token.
        dfinal_NVKE: In the dtype of `Local`, contiguous; None for zeros.
        chunks: Positions of the chunks.
    """
    q, k, grown, left, whole = _factors(local, dout_JIVE.shape[2])
    dout = dout_JIVE.movedim(1, 2).to(k.dtype)
    pulls: list[tuple[torch.Tensor, ...]] = []
    initials = []
    for n, (first, last) in enumerate(pairwise(chunks.first)):
        behind = k.new_zeros(dout.shape[1], k.shape[-1], dout.shape[-1])
        behind = behind if dfinal_NVKE is None else dfinal_NVKE[n]
        backwards = []
        for j in reversed(range(first, last)):
            written = local.scores_JVII[j].mT @ dout[j] + left[j] * (k[j] @ behind)
            missing = local.mix_JVII[j].mT @ written
            backwards.append((behind, missing, written))
            behind = whole[j] * behind + q[j].mT @ (grown[j] * dout[j]) - k[j].mT @ (grown[j] * missing)
        pulls += reversed(backwards)
        initials.append(behind)
    behind_JVKE, missing_JVIE, written_JVIE = map(torch.stack, zip(*pulls, strict=True))
    return Pulls(behind_JVKE, missing_JVIE, written_JVIE, torch.stack(initials))


def _factors(local: Local, value_heads: int) -> tuple[torch.Tensor, ...]:
    """Return q and k for each value head, exp(G), exp(G_last - G) and exp(G_last)."""
    q, k, sums, *_ = local
    q, k = (x.repeat_interleave(value_heads // x.shape[1], dim=1) for x in (q, k))
    sums = sums[..., None]
    return q, k, sums.exp(), (sums[:, :, -1:] - sums).exp(), sums[:, :, -1:].exp()
