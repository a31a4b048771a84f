"""The two token-mixing operations of a gated delta net, over sequences packed into one row.

A gated delta net (three of four layers of Qwen3.5) has no keys and values but a matrix S of fixed size per
head and sequence. Token by token, with unit vectors q and k, a decay g <= 0 and a rate beta in (0, 1),

    S = exp(g) S        d = beta (v - k^T S)        S = S + k d^T        o = q^T S / sqrt(K)

so k^T S is the value that S holds for k, and d the correction written to it. Before that, a causal
convolution of a few taps per channel mixes each token with those just before it.

Token by token this is a chain of vector-matrix products. In chunks of `CHUNK` tokens it becomes products of
matrices: within a chunk the d of all tokens solve a triangular system, whose right side needs S only at the
chunk's beginning (the UT transform of Yang et al., 2024). With G the sums of decays within a chunk, decays
between two tokens are exp(G_i - G_j) for i >= j, each at most 1, so nothing overflows, and

    A = beta_i exp(G_i - G_j) k_i^T k_j  for i > j        M = (1 + A)^-1 diag(beta)
    P = exp(G_i - G_j) q_i^T k_j         for i >= j

are all that a chunk needs besides q, k and v. They are computed for all chunks of all sequences at once, in
batched torch products: chunks form a list without padded sequences, and only the last chunk of a sequence has
places without a token, with beta 0 and decay 0. Only the pass over chunks remains sequential.
`qerl.kernels.delta_scan` defines it: on a GPU it is one kernel (`qerl.kernels.delta_kernels`), elsewhere a
loop.

Backward keeps only the inputs. It computes A, M and P again, repeats the pass over chunks, now storing the
state before each chunk, and passes from the last chunk to the first for the gradients. The rest are batched
products within each chunk: written by hand for the gradients of q, k, G, M and P, and left to torch's
autograd from those to the inputs, with a graph that holds small matrices only. The gradient of the inverse T
is -T^T dT T^T below the diagonal. Forward and backward run over a few key heads at a time, so that their
memory besides inputs and results is about `WORKING_BYTES` however long the row is; forward, which keeps no
states, takes more heads at a time.

On a GPU inputs are of 16 bits, all sums and states FP32. Forward has the precision of FP32, since the sampler
goes token by token in FP32 and both must give the same numbers; outputs are rounded once. Products of
gradients take their operands as TF32, which has three more binary digits than BF16, to which gradients are
rounded in the end. FP64 is computed by torch on any device; it is for tests. The order of all sums is fixed.

Given up: one kernel for A, M and P, which would not write the matrices between them and the inputs; and a
dedicated kernel for the convolution, which gathers its taps one after the other.

Shapes: L tokens of all sequences, N sequences, J chunks, I tokens of a chunk, C channels, W taps, U key heads
of size K, V value heads of size E.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from qerl.kernels import delta_scan
from qerl.kernels.delta_scan import CHUNK, Chunks, Local

WORKING_BYTES = 3 << 29
"""Approximate bytes held at a time besides inputs and results; at least what one key head needs."""

_EPS = 1e-6  # of the norms of q and k


def short_conv(x_LC: torch.Tensor, weight_CW: torch.Tensor, taps_MW: torch.Tensor) -> torch.Tensor:
    """Return ``silu(sum_j weight[:, j] x[taps[m, j]])`` for each m, [M, C] in the dtype of ``x``.

    Products and sums are FP32 (FP64 for FP64 inputs). Backward keeps only the arguments.

    Args:
        x_LC: Input of the convolution.
        weight_CW: Weight of each channel and tap.
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
            # An extra last row takes the writes of taps of -1. Accumulating by index adds in a fixed order.
            dx_LC = dsums_MC.new_zeros(len(x_LC) + 1, x_LC.shape[1])
            for tap, weight_C in enumerate(weight_CW.to(dsums_MC.dtype).unbind(1)):
                dx_LC.index_put_((taps_MW[:, tap],), dsums_MC * weight_C, accumulate=True)
            dx_LC = dx_LC[:-1].to(x_LC.dtype)
        if ctx.needs_input_grad[1]:
            products = [(dsums_MC * _tap(x_LC, tap_M)).sum(0) for tap_M in taps_MW.unbind(1)]
            dweight_CW = torch.stack(products, dim=1).to(weight_CW.dtype)
        return dx_LC, dweight_CW, None


def _convolved(x_LC: torch.Tensor, weight_CW: torch.Tensor, taps_MW: torch.Tensor) -> torch.Tensor:
    """Return the sums [M, C] of a convolution, in FP32 or more."""
    dtype = torch.promote_types(x_LC.dtype, torch.float32)
    sums_MC = x_LC.new_zeros(len(taps_MW), x_LC.shape[1], dtype=dtype)
    for tap_M, weight_C in zip(taps_MW.unbind(1), weight_CW.to(dtype).unbind(1), strict=True):
        sums_MC.addcmul_(_tap(x_LC, tap_M), weight_C)
    return sums_MC


def _tap(x_LC: torch.Tensor, tap_M: torch.Tensor) -> torch.Tensor:
    """Return the rows [M, C] of x that a tap reads, in FP32 or more, with zeros where the tap is -1."""
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
    """Apply the gated delta rule to N sequences; differentiable in all tensors.

    Backward keeps only the arguments. The same inputs give the same bits.

    Args:
        q_LUK, k_LUK: Before normalisation; they are normalised here, and q divided by sqrt(K). Value head j
            reads key head ``j // (V / U)``.
        v_LVE: In the same dtype.
        decay_LV: g, FP32.
        beta_LV: FP32 or the dtype of v.
        offsets: First token of each sequence in the row, then L: N + 1 numbers. Each sequence has at least
            one token.
        initial_NVKE: State before each sequence, FP32; None for zeros.

    Returns:
        Outputs [L, V, E] in the dtype of v, and the state [N, V, K, E] after each sequence in FP32. For FP64
        inputs both are FP64.
    """
    chunks = Chunks.of(offsets, v_LVE.device)
    inputs = _Inputs(q_LUK, k_LUK, v_LVE, decay_LV, beta_LV, initial_NVKE)
    return cast(tuple[torch.Tensor, torch.Tensor], _DeltaRule.apply(chunks, *inputs))


class _Inputs(NamedTuple):
    """The tensors in which the rule is differentiable, or their gradients."""

    q_LUK: torch.Tensor
    k_LUK: torch.Tensor
    v_LVE: torch.Tensor
    decay_LV: torch.Tensor
    beta_LV: torch.Tensor
    initial_NVKE: torch.Tensor | None

    def heads(self, keys: slice) -> "_Inputs":
        """Return the inputs of some key heads and of the value heads that read them."""
        share = self.v_LVE.shape[1] // self.q_LUK.shape[1]
        values = slice(keys.start * share, keys.stop * share)
        q, k, *rest = self
        return _Inputs(q[:, keys], k[:, keys], *(None if x is None else x[:, values] for x in rest))  # type: ignore[arg-type]


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: Chunks, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = _Inputs(*tensors)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.chunks = chunks
        parts = [_forward(inputs.heads(keys), chunks) for keys in _groups(inputs, chunks, keep=False)]
        outs, finals = zip(*parts, strict=True)
        return _side_by_side(outs), _side_by_side(finals)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout_LVE: torch.Tensor | None, dfinal_NVKE: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        inputs = _Inputs(*ctx.saved_tensors)
        if dout_LVE is None:
            dout_LVE = torch.zeros_like(inputs.v_LVE)
        parts = []
        for keys in _groups(inputs, ctx.chunks, keep=True):
            heads = inputs.heads(keys)
            pulls = inputs._replace(v_LVE=dout_LVE, initial_NVKE=dfinal_NVKE).heads(keys)
            parts.append(_backward(heads, pulls.v_LVE, pulls.initial_NVKE, ctx.chunks))
        *of_tokens, initials = zip(*parts, strict=True)
        dinitial_NVKE = None if inputs.initial_NVKE is None else _side_by_side(initials)
        return None, *map(_side_by_side, of_tokens), dinitial_NVKE


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the results of groups of heads."""
    return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]


def numbers_of_key_head(values: int, key_size: int, size: int, keep: bool) -> int:
    """Return about how many numbers are held per chunk of a key head, besides inputs and results.

    Args:
        values: Value heads that read the key head.
        key_size, size: Size of a key head, and of a value head.
        keep: Whether the numbers that gradients need are included.
    """
    # Per value head: v and outputs, and [I, I] matrices. Per key head: q and k before and after
    # normalisation, products of them, and gradients.
    value = CHUNK * (2 * size + 9 * CHUNK)
    if keep:  # states, R and X with gradients; gradients of outputs and, by value head, q and k
        value += 2 * key_size * size + CHUNK * (5 * size + 3 * key_size)
    return values * value + CHUNK * (8 * key_size + 4 * CHUNK)


def _groups(inputs: _Inputs, chunks: Chunks, keep: bool) -> list[slice]:
    """Return the key heads to compute at a time: as many as fit into `WORKING_BYTES`, at least one.

    Their memory is with or without the numbers that gradients need (``keep``).
    """
    (_, key_heads, key_size), (_, heads, size) = inputs.q_LUK.shape, inputs.v_LVE.shape
    numbers = numbers_of_key_head(heads // key_heads, key_size, size, keep)
    each = len(chunks.rows_JI) * numbers * _working(inputs).itemsize
    at_once = max(1, min(key_heads, WORKING_BYTES // each))
    return [slice(first, min(first + at_once, key_heads)) for first in range(0, key_heads, at_once)]


def _working(inputs: _Inputs) -> torch.dtype:
    """Return the dtype of sums and states."""
    return torch.promote_types(inputs.v_LVE.dtype, torch.float32)


def _steps(tensor: torch.Tensor) -> Any:
    """Return the module whose `inverse`, `scan` and `scan_backward` take sums of this dtype on this
    device."""
    if tensor.is_cuda and tensor.dtype == torch.float32:
        from qerl.kernels import delta_kernels  # without a GPU, Triton may be missing

        return delta_kernels
    return delta_scan


def _forward(inputs: _Inputs, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [L, V, E] and states [N, V, K, E]."""
    split = _split(inputs, chunks)
    local = _local(split, chunks)
    out_JIVE, final_NVKE, _ = _steps(local.k_JUIK).scan(local, split.v, split.initial, chunks, keep=False)
    return chunks.join(out_JIVE), final_NVKE


def _backward(
    inputs: _Inputs, dout_LVE: torch.Tensor, dfinal_NVKE: torch.Tensor | None, chunks: Chunks
) -> _Inputs:
    """Return the gradients of all inputs, from those of the outputs and, if given, of the states."""
    split = _split(inputs, chunks)
    leaves = [x.requires_grad_() for x in (split.q, split.k, split.decay, split.beta)]
    with torch.enable_grad():
        graph = _local(split, chunks)
    local = Local(*(x.detach() for x in graph))
    steps, dtype = _steps(local.k_JUIK), local.k_JUIK.dtype
    *_, kept = steps.scan(local, split.v, split.initial, chunks, keep=True)
    dout_JIVE = chunks.split(dout_LVE).masked_fill_(~chunks.real_JI[..., None, None], 0)
    dfinal_NVKE = None if dfinal_NVKE is None else dfinal_NVKE.to(dtype).contiguous()
    pulls = steps.scan_backward(local, dout_JIVE, dfinal_NVKE, chunks)
    dinitial_NVKE = pulls.initial_NVKE if split.initial is not None else None
    dv_LVE = chunks.join(pulls.missing_JVIE.movedim(1, 2).to(split.v.dtype))
    dout_JVIE = dout_JIVE.movedim(2, 1).to(dtype).contiguous()
    with _tf32():
        pulled = _chunk_gradients(local, dout_JVIE, kept, pulls)
        del kept, pulls, dout_JIVE, dout_JVIE
        dq, dk, ddecay, dbeta = map(chunks.join, torch.autograd.grad(graph, leaves, pulled))
    return _Inputs(dq, dk, dv_LVE, ddecay, dbeta, dinitial_NVKE)


def _chunk_gradients(
    local: Local, dout_JVIE: torch.Tensor, kept: delta_scan.Kept, pulls: delta_scan.Pulls
) -> Local:
    """Return the gradients that q, k, G, M and P get from the pass over chunks."""
    heads = dout_JVIE.shape[1]
    share = heads // local.k_JUIK.shape[1]

    def by_key(x_JVIK: torch.Tensor) -> torch.Tensor:
        return x_JVIK.unflatten(1, (-1, share))

    q, k = local.q_JUIK[:, :, None], local.k_JUIK[:, :, None]
    grown = local.sums_JVI.exp()[..., None]
    last = local.sums_JVI[..., -1:]
    dq = (dout_JVIE @ kept.states_JVKE.mT).mul_(grown)
    dsums = (by_key(dq) * q).sum(-1)
    dq_JUIK = by_key(dq).sum(2)
    del dq
    dk = (pulls.missing_JVIE @ kept.states_JVKE.mT).mul_(-grown)
    dsums += (by_key(dk) * k).sum(-1)
    dk_JUIK = by_key(dk).sum(2)
    del dk
    dk = (kept.written_JVIE @ pulls.behind_JVKE.mT).mul_((last - local.sums_JVI).exp()[..., None])
    left = (by_key(dk) * k).sum(-1)
    dk_JUIK += by_key(dk).sum(2)
    del dk
    dsums_JVI = (dsums - left).flatten(1, 2)
    faded = torch.linalg.vecdot(kept.states_JVKE.flatten(2), pulls.behind_JVKE.flatten(2))
    dsums_JVI[..., -1] += left.flatten(1, 2).sum(-1) + last[..., 0].exp() * faded
    dmix_JVII = pulls.written_JVIE @ kept.missing_JVIE.mT
    dscores_JVII = dout_JVIE @ kept.written_JVIE.mT
    return Local(dq_JUIK, dk_JUIK, dsums_JVI, dmix_JVII, dscores_JVII)


class _Split(NamedTuple):
    """Inputs by chunks, [J, I, heads, ...], and the initial states as the pass over chunks reads them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    initial: torch.Tensor | None


def _split(inputs: _Inputs, chunks: Chunks) -> _Split:
    *of_tokens, initial_NVKE = inputs
    if initial_NVKE is not None:
        initial_NVKE = initial_NVKE.to(_working(inputs)).contiguous()
    q, k, v, decay, beta = (chunks.split(x) for x in cast(list[torch.Tensor], of_tokens))
    return _Split(q, k, v, decay, beta, initial_NVKE)


def _local(split: _Split, chunks: Chunks) -> Local:
    """Return the tensors that the pass over chunks reads, differentiable where the inputs are."""
    dtype, device = torch.promote_types(split.v.dtype, torch.float32), split.v.device
    share = split.v.shape[2] // split.k.shape[2]

    def unit(x_JIUK: torch.Tensor) -> torch.Tensor:
        x_JUIK = x_JIUK.transpose(1, 2).to(dtype).contiguous()
        return x_JUIK * (x_JUIK.square().sum(-1, keepdim=True) + _EPS).rsqrt()

    def of_tokens(x_JIV: torch.Tensor) -> torch.Tensor:
        """[J, V, I], zeros where a chunk has no token."""
        return x_JIV.to(dtype).masked_fill(~chunks.real_JI[..., None], 0).transpose(1, 2).contiguous()

    def of_value_heads(x_JUII: torch.Tensor, factor_JVII: torch.Tensor) -> torch.Tensor:
        return (x_JUII[:, :, None] * factor_JVII.unflatten(1, (-1, share))).flatten(1, 2)

    q_JUIK, k_JUIK = unit(split.q) * split.q.shape[-1] ** -0.5, unit(split.k)
    beta_JVI, sums_JVI = of_tokens(split.beta), of_tokens(split.decay).cumsum(-1)
    seen_II = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril()
    between_JVII = (sums_JVI[..., :, None] - sums_JVI[..., None, :]).masked_fill(~seen_II, -torch.inf).exp()
    system_JVII = of_value_heads(k_JUIK @ k_JUIK.mT, between_JVII) * beta_JVI[..., None]
    mix_JVII = _Inverse.apply(system_JVII) * beta_JVI[..., None, :]
    scores_JVII = of_value_heads(q_JUIK @ k_JUIK.mT, between_JVII)
    return Local(q_JUIK, k_JUIK, sums_JVI, mix_JVII, scores_JVII)


class _Inverse(torch.autograd.Function):
    """`delta_scan.inverse`, with a gradient."""

    @staticmethod
    def forward(ctx: Any, system_JVII: torch.Tensor) -> torch.Tensor:
        inverse_JVII: torch.Tensor = _steps(system_JVII).inverse(system_JVII)
        ctx.save_for_backward(inverse_JVII)
        return inverse_JVII

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dinverse_JVII: torch.Tensor) -> torch.Tensor:
        (inverse_JVII,) = ctx.saved_tensors
        return (inverse_JVII.mT @ dinverse_JVII @ inverse_JVII.mT).tril_(-1).neg_()


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """Compute products of FP32 matrices in TF32 on a GPU inside the block; other code keeps its setting.

    torch has an older and a newer name for this setting and refuses to go on where they contradict each
    other. The older one sets both.
    """
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    if before == "tf32":
        yield
        return
    setting.allow_tf32 = True
    try:
        yield
    finally:
        setting.allow_tf32 = False
        setting.fp32_precision = before
