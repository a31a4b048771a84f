"""The two operations of a gated delta net that mix tokens, over sequences one behind another in a row.

A gated delta net (three of four layers of Qwen3.5) has no keys and values but a matrix S of fixed size per
head and sequence. Token by token, with unit vectors q and k, a decay g <= 0 and a rate beta in (0, 1),

    S = exp(g) S        d = beta (v - k^T S)        S = S + k d^T        o = q^T S / sqrt(K)

so k^T S is what S answers to k, and d what is written to correct it. In front of that a causal convolution of
a few taps per channel mixes each token with those just before it.

Token by token this is one product of a vector with a matrix after the other. By chunks of `CHUNK` tokens it
is products of matrices: within a chunk the d of all tokens solve a triangular system, whose right side needs
S only at the chunk's beginning (the UT transform of Yang et al., 2024). What remains one after the other is a
pass over chunks. Decays are multiplied as differences of their sums, each at most 0, so nothing overflows.

On a GPU the recurrence is that of the package fla-core, which computes by chunks of the same size. It sums in
16-bit products with FP32 totals, carries states in FP32, and adds in a fixed order, without atomics. Which
tiles it takes it decides by time at the first call and keeps in Triton's cache: where that was emptied, or on
another card, last bits may differ. Elsewhere it is written out here, all of it in FP32, with each sequence as
a row of a padded batch: padding has beta 0 and decay 0 and leaves the state as it is.

Given up: a kernel of our own for the convolution, which gathers its taps one after the other.

Shapes: L tokens of all sequences, N sequences, T tokens of a padded sequence, C channels, W taps, U key heads
of size K, V value heads of size E.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl.errors import QeRLError
from qerl.kernels.needs import how_to_install
from qerl.kernels.tensors import upload

CHUNK = 64
"""Tokens that are computed by products of matrices at once."""

_EPS = 1e-6  # of the norms of q and k


def short_conv(x_LC: torch.Tensor, weight_CW: torch.Tensor, taps_MW: torch.Tensor) -> torch.Tensor:
    """``silu(sum_j weight[:, j] x[taps[m, j]])`` for each m, [M, C] in the dtype of ``x``.

    Products and sums are FP32 (FP64 of FP64 inputs). Kept for backward are the arguments alone.

    Args:
        x_LC: What the convolution reads.
        weight_CW: Of each channel and tap.
        taps_MW: int64 on the same device, the row of ``x`` that each tap of an output reads, -1 for zeros.
            The last tap is the token itself: outputs come in the order in which its column names tokens.
    """
    return _ShortConv.apply(x_LC, weight_CW, taps_MW)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LC: torch.Tensor, weight_CW: torch.Tensor, taps_MW: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_LC, weight_CW, taps_MW)
        return functional.silu(_convolved(x_LC, weight_CW, taps_MW)).to(x_LC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_MC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_LC, weight_CW, taps_MW = ctx.saved_tensors
        sums_MC = _convolved(x_LC, weight_CW, taps_MW)
        gate_MC = sums_MC.sigmoid()
        dsums_MC = dout_MC * gate_MC * (1 + sums_MC * (1 - gate_MC))
        dx_LC = dweight_CW = None
        if ctx.needs_input_grad[0]:
            # A row more, the last, which taps of -1 write to. To accumulate by index adds in a fixed order.
            dx_LC = dsums_MC.new_zeros(len(x_LC) + 1, x_LC.shape[1])
            for tap, weight_C in enumerate(weight_CW.to(dsums_MC.dtype).unbind(1)):
                dx_LC.index_put_((taps_MW[:, tap],), dsums_MC * weight_C, accumulate=True)
            dx_LC = dx_LC[:-1].to(x_LC.dtype)
        if ctx.needs_input_grad[1]:
            products = [(dsums_MC * _tap(x_LC, tap_M)).sum(0) for tap_M in taps_MW.unbind(1)]
            dweight_CW = torch.stack(products, dim=1).to(weight_CW.dtype)
        return dx_LC, dweight_CW, None


def _convolved(x_LC: torch.Tensor, weight_CW: torch.Tensor, taps_MW: torch.Tensor) -> torch.Tensor:
    """The sums [M, C] of a convolution, in FP32 or more."""
    dtype = torch.promote_types(x_LC.dtype, torch.float32)
    sums_MC = x_LC.new_zeros(len(taps_MW), x_LC.shape[1], dtype=dtype)
    for tap_M, weight_C in zip(taps_MW.unbind(1), weight_CW.to(dtype).unbind(1), strict=True):
        sums_MC.addcmul_(_tap(x_LC, tap_M), weight_C)
    return sums_MC


def _tap(x_LC: torch.Tensor, tap_M: torch.Tensor) -> torch.Tensor:
    """Rows [M, C] of x in FP32 or more, zeros where a tap is -1."""
    rows_MC = x_LC[tap_M.clamp(min=0)].to(torch.promote_types(x_LC.dtype, torch.float32))
    return rows_MC.masked_fill_((tap_M < 0)[:, None], 0)


def chunked_delta_rule(
    q_LUK: torch.Tensor,
    k_LUK: torch.Tensor,
    v_LVE: torch.Tensor,
    decay_LV: torch.Tensor,
    beta_LV: torch.Tensor,
    offsets: Sequence[int],
    initial_NVKE: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over N sequences, differentiable in all tensors.

    Args:
        q_LUK, k_LUK: As they come; they are normalised here, and q divided by sqrt(K). Value head j reads key
            head ``j // (V / U)``.
        v_LVE: In the same dtype.
        decay_LV: g, FP32.
        beta_LV: FP32 or the dtype of v.
        offsets: Where in the row each sequence begins, and L: N + 1 numbers. Each has at least one token.
        initial_NVKE: State in front of each sequence, FP32; None for zeros.

    Returns:
        Outputs [L, V, E] in the dtype of v, and the state [N, V, K, E] behind each sequence in FP32. Of FP64
        inputs both are FP64, where no GPU computes.

    Raises:
        QeRLError: The tensors are on a GPU and fla-core is not installed.
    """
    run = _by_package if v_LVE.is_cuda else _by_batch
    return run(q_LUK, k_LUK, v_LVE, decay_LV, beta_LV, offsets, initial_NVKE)


def _by_package(
    q_LUK: torch.Tensor,
    k_LUK: torch.Tensor,
    v_LVE: torch.Tensor,
    decay_LV: torch.Tensor,
    beta_LV: torch.Tensor,
    offsets: Sequence[int],
    initial_NVKE: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # takes seconds to import
    except ImportError as error:
        raise QeRLError(
            f"Gated delta nets on a GPU need the package fla-core ({error}); run "
            f"`{how_to_install('fla-core')}`."
        ) from error
    # Sequence and place in it of each chunk. The package would make them itself, and wait for the GPU.
    chunks = [(n, c) for n, (a, b) in enumerate(pairwise(offsets)) for c in range(-(-(b - a) // CHUNK))]
    out_1LVE, final_NVKE = chunk_gated_delta_rule(
        q=q_LUK[None],
        k=k_LUK[None],
        v=v_LVE[None],
        g=decay_LV[None],
        beta=beta_LV[None],
        initial_state=initial_NVKE,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=upload(torch.tensor(offsets), v_LVE.device),
        chunk_indices=upload(torch.tensor(chunks), v_LVE.device),
        chunk_size=CHUNK,
    )
    return out_1LVE.squeeze(0), final_NVKE


def _by_batch(
    q_LUK: torch.Tensor,
    k_LUK: torch.Tensor,
    v_LVE: torch.Tensor,
    decay_LV: torch.Tensor,
    beta_LV: torch.Tensor,
    offsets: Sequence[int],
    initial_NVKE: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(v_LVE.dtype, torch.float32)
    value_heads, size = v_LVE.shape[1:]
    lengths = [stop - start for start, stop in pairwise(offsets)]
    length = min(CHUNK, max(lengths))  # of a chunk
    chunks = -(-max(lengths) // length)
    index_NT = torch.full((len(lengths), chunks * length), -1, device=v_LVE.device)
    for row, (start, stop) in enumerate(pairwise(offsets)):
        index_NT[row, : stop - start] = torch.arange(start, stop, device=v_LVE.device)

    def batch(x_L: torch.Tensor) -> torch.Tensor:
        """[N, heads, chunks, tokens of a chunk, ...], with zeros as padding."""
        with_zeros = torch.cat([x_L.to(dtype), x_L.new_zeros(1, *x_L.shape[1:], dtype=dtype)])
        return with_zeros[index_NT].unflatten(1, (chunks, length)).movedim(3, 1)

    def unit(x_LUK: torch.Tensor) -> torch.Tensor:
        """Batch of unit vectors, for each value head."""
        x = batch(x_LUK)
        x = x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()
        return x.repeat_interleave(value_heads // x_LUK.shape[1], dim=1)

    q, k, v = unit(q_LUK) * q_LUK.shape[-1] ** -0.5, unit(k_LUK), batch(v_LVE)
    beta, decay = batch(beta_LV)[..., None], batch(decay_LV).cumsum(-1)
    seen = torch.ones(length, length, dtype=torch.bool, device=v.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    since, until = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
    system = (beta * k @ k.mT) * between
    right = torch.cat([beta * v, beta * since * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split([size, k.shape[-1]], dim=-1)
    scores, q, k, whole = (q @ k.mT) * between, q * since, k * until, since[..., -1:, :]

    state = q.new_zeros(len(lengths), value_heads, k.shape[-1], size)
    state = state if initial_NVKE is None else initial_NVKE.to(dtype)
    outs = []
    for at in range(chunks):
        written = from_values[:, :, at] - from_state[:, :, at] @ state
        outs.append(q[:, :, at] @ state + scores[:, :, at] @ written)
        state = state * whole[:, :, at] + k[:, :, at].mT @ written
    out_NTVE = torch.stack(outs, dim=2).movedim(1, 3).flatten(1, 2)
    return out_NTVE[index_NT >= 0].to(v_LVE.dtype), state
