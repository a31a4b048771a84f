"""A gated delta net between its two products, for one new token of each sequence, in three launches.

Such a layer keeps a matrix S [K, E] per value head instead of keys and values, so the last token of a
sequence takes no more memory and time than its first. A token with key k and value v decays S, moves the
value that S holds for k towards v at the rate beta, and reads S with its query q:

    q, k, v = silu(convolution(x W_qkv^T)); q, k = q / |q| / sqrt(K), k / |k|   # delta_inputs
    g = -exp(A_log) softplus(a + dt_bias); beta = sigmoid(b); z = x W_z^T
    S = exp(g) S; d = beta (v - k^T S); S = S + k d^T; o = q^T S                # delta_step
    y = rmsnorm(o) * weight * silu(z)                                           # gated_norm

The convolution runs along the sequence, for each channel by itself, over the token's input and the W - 1
before. Inputs are kept in a ring of W places, that of position p at p % W, rather than in a shifted window. A
token then writes one number per channel instead of W - 1, and none that another program or thread still
reads. Its own input is rounded to the ring's dtype before use, so it is the same number in all W outputs.

a and b are V columns each, too few for a product of their own. Their weights, in 16 bits, are further rows of
the product's stacked A, so a and b are columns of its sum x A^T, in FP32, behind those of the adapters.

S is most of the memory traffic of such a layer besides its weights: 1 MB per sequence with 32 heads of 128 in
BF16, and as much again if it were written at each token. So it is written at every STATE_TOKENS-th position
only. The k, the d and the sum of g of the up to STATE_TOKENS - 1 tokens since then are in a ring beside it,
12 KB per token, and S is the written S' decayed by all of them, plus each k d^T decayed by those after it:

    S = exp(G) S' + sum_i exp(G - G_i) k_i d_i^T

All sums are FP32. S' is rounded to BF16, once per STATE_TOKENS tokens, and so are the k and d of the ring.
Given up: writing the states of all rows in the same step, since their positions differ.

delta_step is in CUDA (delta_step.cu): in Triton each of its small sums changes layouts, with 50 barriers in
all, and it took three times as long as its memory traffic. On a CPU it is computed by its formula.

A step has one token of each sequence: a second one in the same slot would need what the first one writes.

Shapes: as in `qerl.kernels.decode.common`; U heads of queries and of keys, K their size, V heads of values, E
their size, C = 2 U K + V E channels (q, k, v), M = V E, W inputs of a convolution; S also slots of sequences;
P maximum tokens since a state was written, F = U K + V E numbers of each.
"""

from pathlib import Path

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import (
    apply_a,
    apply_b,
    begin,
    both,
    in_head,
    inverse_rms,
    load_a,
    load_b,
    load_head,
    partial_counts,
    store_operand,
    sum_partials,
)
from qerl.kernels.decode.launch import NO_A, LoraA, LoraB
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import rank_part
from qerl.kernels.nvrtc import kernel

STEP_SOURCE = Path(__file__).with_name("delta_step.cu")


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with as many digits where x is far below 0.

    log(1 + y) is 2 artanh(s) of s = y / (2 + y), here at most 1/3, by its series. The GPU's own logarithm is
    off by 2^-22 around 1, which may be all that there is of it.
    """
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = 1.0 / 11 + square * (1.0 / 13)
    series = 1.0 / 7 + square * (1.0 / 9 + square * series)
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * series))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _delta_inputs(
    gemm_STN, partials_G, scale_2, squares_PT, xa_TR, b_NR, conv_WC, decay_V, dt_bias_V, position_T, slot_T,
    inputs_SWC, heads_TC, z_TM, gates_2TV,
    T, N, D, eps,
    S: tl.constexpr, SQ_P: tl.constexpr, SQ_PADDED: tl.constexpr,
    R: tl.constexpr, PART: tl.constexpr, R_TOTAL: tl.constexpr,
    U: tl.constexpr, V: tl.constexpr, K: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr,
    W: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * U * K + V * E
    head = tl.program_id(0)  # queries, keys, values, z
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    e = tl.arange(0, PADDED)
    if K == E:
        in_e = in_head(e, E)
        n = head * E + e
    else:
        in_e = e < tl.where(head < 2 * U, K, E)
        n = tl.where(head < 2 * U, head * K, 2 * U * K + (head - 2 * U) * E) + e
    linear = (head >= 2 * U + V).to(tl.int32)
    slot = tl.load(slot_T + t, mask=in_t, other=-1)
    slot = tl.where(linear == 0, slot, -1)  # z has no place in the ring
    position = tl.load(position_T + t, mask=in_t, other=0)
    # Ahead of the wait: earlier steps have written the ring, long before the last product. What is loaded is
    # not used before the wait either, or the product's output would be asked for only when it has come.
    kept = both((slot >= 0)[:, None], in_e)
    ring = inputs_SWC + slot.to(tl.int64)[:, None] * (W * C) + n[None, :]
    convolved = in_e & (n < C)
    earlier, taps = (), ()
    for back in tl.static_range(1, W):
        at = ring + ((position - back) % W)[:, None] * C
        inside = kept & (position >= back)[:, None]
        earlier += (tl.load(at, mask=inside, other=0.0),)  # type: ignore[assignment]
        tap = conv_WC + (W - 1 - back) * C + n
        taps += (tl.load(tap, mask=convolved, other=0.0),)  # type: ignore[assignment]
    newest = tl.load(conv_WC + (W - 1) * C + n, mask=convolved, other=0.0)
    scale = tl.load(scale_2 + linear)
    counts = partial_counts(partials_G, n, in_e, S)
    if R > 0:  # last, because its change of layout waits for it
        b = load_b(b_NR, n, in_e, 0, R, PART)
    begin(PDL)
    rms = inverse_rms(squares_PT, t, in_t, T, D, eps, SQ_P, SQ_PADDED)
    x = sum_partials(gemm_STN, counts, t, in_t, n, in_e, T, N, S) * scale
    if R > 0:
        x += apply_b(xa_TR, linear * R, b, b_NR, n, in_e, t, in_t, R_TOTAL, R, PART)
    x *= rms[:, None]
    inside = both(in_t[:, None], in_e)
    if linear == 0:
        own = x.to(inputs_SWC.dtype.element_ty)
        tl.store(ring + (position % W)[:, None] * C, own, mask=kept)
        y = own.to(tl.float32) * newest.to(tl.float32)[None, :]
        for i in tl.static_range(W - 1):
            y += earlier[i].to(tl.float32) * taps[i].to(tl.float32)[None, :]
        y *= tl.sigmoid(y)
        if head < 2 * U:
            y *= tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)[:, None]
            y *= tl.where(head < U, K**-0.5, 1.0)
        tl.store(heads_TC + t[:, None].to(tl.int64) * C + n[None, :], y, mask=inside)
    else:  # z, whose programs have the least to do, and so the gates of their head too
        tl.store(z_TM + t[:, None].to(tl.int64) * (V * E) + (n - C)[None, :], x, mask=inside)
        v = head - 2 * U - V
        gate = xa_TR + t * R_TOTAL + 2 * R + v
        beta = tl.sigmoid(tl.load(gate, mask=in_t, other=0.0) * rms)
        a = tl.load(gate + V, mask=in_t, other=0.0) * rms
        g = tl.load(decay_V + v) * softplus(a + tl.load(dt_bias_V + v))
        tl.store(gates_2TV + t * V + v, g, mask=in_t)
        tl.store(gates_2TV + (T + t) * V + v, beta, mask=in_t)


@triton.jit
def _gated_norm(
    out_TVE, z_TM, weight_E, a_RK, y_TM, parts_PTR, T, eps,
    V: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    A_RANKS: tl.constexpr, A_PART: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = V * E
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    e = tl.arange(0, E_PADDED)
    in_e = in_head(e, E)
    m = head * E + e
    weight = load_head(weight_E + e, in_e)
    if A_RANKS > 0:
        a = load_a(a_RK, 0, m, in_e, M, A_RANKS, A_PART)
    begin(PDL)
    inside = both(in_t[:, None], in_e)
    at = t[:, None].to(tl.int64) * M + m[None, :]
    x = tl.load(out_TVE + at, mask=inside, other=0.0)
    z = tl.load(z_TM + at, mask=inside, other=0.0)
    norm = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / E + eps)
    y = (x * norm[:, None] * weight[None, :] * z * tl.sigmoid(z)).to(y_TM.dtype.element_ty)
    store_operand(y_TM, y, t, m, inside, M, PADDED)
    if A_RANKS > 0:
        apply_a(parts_PTR, head, y, a, a_RK, m, in_e, M, t, in_t, T, A_RANKS, A_PART)


def delta_inputs(
    gemm_STN: torch.Tensor,
    scale_2: torch.Tensor,
    squares_PT: torch.Tensor,
    conv_WC: torch.Tensor,
    decay_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    position_T: torch.Tensor,
    slot_T: torch.Tensor,
    inputs_SWC: torch.Tensor,
    heads_TC: torch.Tensor,
    z_TM: torch.Tensor,
    gates_2TV: torch.Tensor,
    *,
    key_heads: int,
    width: int,
    eps: float,
    b: LoraB,
    partials_G: torch.Tensor | None = None,
) -> None:
    """Write the inputs of the recurrence and its gate, and store the token's inputs of the convolution.

    Args:
        gemm_STN: fp32 or bf16 [S, T, N], N at least C + M: q, k, v and z of all heads.
        scale_2: fp32 factors of the two linears, that of q, k and v and that of z.
        squares_PT: Partial sums of squares from `residual_norm`; empty where the input has no norm.
        conv_WC: Weights of the convolution, any floating dtype; the last row is that of the token itself.
        decay_V: fp32, -exp(A_log).
        dt_bias_V: fp32.
        position_T: int32 position of each token.
        slot_T: int32, the slot of each token's sequence, with its inputs and state, each at most once; -1 for
            a token without a slot, whose results are undefined.
        inputs_SWC: The activations' dtype, inputs of the convolution, position p at p % W; the token's own is
            written, and places before the first position are not read.
        heads_TC: fp32, written: q of unit length / sqrt(K), k of unit length, v.
        z_TM: fp32, written.
        gates_2TV: fp32, written: g, and beta.
        key_heads: U.
        width: Hidden size, over which the mean square is taken.
        eps: Added to the mean square, as the RMSNorm does.
        b: LoRA of both linears: their stacked B, None without an adapter (R = 0); and the sum x A^T
            [T, 2 R + 2 V] with the columns of A of both, then in_proj_b's, then in_proj_a's.
        partials_G: int32, how many of the S partial sums each 64 columns have; None if S is 1.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    splits, tokens, columns = gemm_STN.shape
    taps, channels = conv_WC.shape
    value_heads, squares = gates_2TV.shape[2], squares_PT.shape[0]
    size = z_TM.shape[1] // value_heads
    key_size = (channels - value_heads * size) // (2 * key_heads)
    block_t, shared = 16, shared_bytes(heads_TC)
    assert b.xa.sum_TR is not None, "the gates' inputs are columns of x A^T"
    arguments = pointers(
        "delta_inputs", gemm_STN, gemm_STN=gemm_STN, partials_G=partials_G, scale_2=scale_2,
        squares_PT=squares_PT, xa_TR=b.xa.sum_TR, b_NR=b.b_NR, conv_WC=conv_WC, decay_V=decay_V,
        dt_bias_V=dt_bias_V, position_T=position_T, slot_T=slot_T, inputs_SWC=inputs_SWC,
        heads_TC=heads_TC, z_TM=z_TM, gates_2TV=gates_2TV,
    )  # fmt: skip
    _delta_inputs[(2 * key_heads + 2 * value_heads, triton.cdiv(tokens, block_t))](
        *arguments, tokens, columns, width, eps,
        S=splits, SQ_P=squares, SQ_PADDED=triton.next_power_of_2(squares),
        **b.constants(rank_part(b.ranks, shared)), R_TOTAL=b.xa.sum_TR.shape[1],
        U=key_heads, V=value_heads, K=key_size, E=size, PADDED=_padded(max(key_size, size)),
        W=taps, BLOCK_T=block_t, num_warps=4, **dependent(gemm_STN),
    )  # fmt: skip


def _padded(size: int) -> int:
    """Return the numbers that a kernel holds per head: a power of two, as tiles need, from 16 on, for tensor
    cores."""
    return max(16, triton.next_power_of_2(size))


def block_columns(size: int) -> int:
    """Return the columns of a state per block of delta_step.cu: at most 64, a multiple of 8 that divides E.

    It is the largest such number. From 1 to 128 rows of 32 heads of 128 no other width was faster on an H200.
    """
    return next(each for each in range(64, 0, -1) if size % each == each % 8 == 0)


def delta_step(
    heads_TC: torch.Tensor,
    gates_2TV: torch.Tensor,
    state_SVKE: torch.Tensor,
    recent_SPF: torch.Tensor,
    fades_SPV: torch.Tensor,
    position_T: torch.Tensor,
    slot_T: torch.Tensor,
    out_TVE: torch.Tensor,
) -> None:
    """Advance each sequence by one token, in place, and read its state with the token's query.

    Args:
        heads_TC, gates_2TV: As :func:`delta_inputs` left them.
        state_SVKE: bf16 on a GPU, the state before the last position that is a multiple of P + 1; written at
            the slots of tokens whose next position is such a multiple. On a GPU E is a multiple of 8.
        recent_SPF: In the same dtype, k and d of the tokens from that position on; the token's own are
            written.
        fades_SPV: fp32, the sum of g from that position on; the token's own is written.
        position_T: int32 position of each token.
        slot_T: int32, the slot of each token, each at most once; -1: no state is read or written.
        out_TVE: fp32, written: q^T S, zeros for a token without a slot.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tensors = pointers(
        "delta_step", out_TVE, heads_TC=heads_TC, gates_2TV=gates_2TV, state_SVKE=state_SVKE,
        recent_SPF=recent_SPF, fades_SPV=fades_SPV, position_T=position_T, slot_T=slot_T, out_TVE=out_TVE,
    )  # fmt: skip
    tokens, channels = heads_TC.shape
    heads, key_size, size = state_SVKE.shape[1:]
    if not out_TVE.is_cuda:
        _step_by_formula(*tensors)
        return
    columns = block_columns(size)
    sizes = (channels - heads * size) // (2 * key_size), heads, key_size, size, columns, recent_SPF.shape[1]
    defines = tuple(zip(("U", "V", "K", "E", "COLUMNS", "P"), sizes, strict=True))
    compiled = kernel(STEP_SOURCE, "delta_step", defines, out_TVE.device.index or 0)
    compiled((heads * (size // columns), tokens), 128, 0, tensors, (tokens,))


def _step_by_formula(
    heads_TC: torch.Tensor,
    gates_2TV: torch.Tensor,
    state_SVKE: torch.Tensor,
    recent_SPF: torch.Tensor,
    fades_SPV: torch.Tensor,
    position_T: torch.Tensor,
    slot_T: torch.Tensor,
    out_TVE: torch.Tensor,
) -> None:
    """Compute :func:`delta_step` for fp32 tensors on a CPU."""
    here_T = slot_T >= 0
    slot_N, position_N, (fade_NV, beta_NV) = (
        slot_T[here_T].long(),
        position_T[here_T].long(),
        gates_2TV[:, here_T],
    )
    heads, key_size, size = state_SVKE.shape[1:]
    key_channels = (heads_TC.shape[1] - heads * size) // 2
    q_NK, k_NK, v_NM = heads_TC[here_T].split([key_channels, key_channels, heads * size], dim=1)
    share = heads * key_size // key_channels
    q_NVK, k_NVK = (x.unflatten(1, (-1, key_size)).repeat_interleave(share, dim=1) for x in (q_NK, k_NK))
    held = state_SVKE[slot_N], recent_SPF[slot_N], fades_SPV[slot_N]
    state_NVKE = states_now(*held, position_N) * fade_NV.exp()[..., None, None]
    known_NVE = torch.einsum("nvk,nvke->nve", k_NVK, state_NVKE)
    delta_NVE = beta_NV[..., None] * (v_NM.unflatten(1, (heads, size)) - known_NVE)
    state_NVKE = state_NVKE + k_NVK[..., None] * delta_NVE[:, :, None]
    out_TVE.zero_()
    out_TVE[here_T] = torch.einsum("nvk,nvke->nve", q_NVK, state_NVKE)
    since_N = position_N % (recent_SPF.shape[1] + 1)
    full_N = since_N == recent_SPF.shape[1]
    state_SVKE[slot_N[full_N]] = state_NVKE[full_N]
    open_N, since_N = slot_N[~full_N], since_N[~full_N]
    recent_SPF[open_N, since_N] = torch.cat([k_NK, delta_NVE.flatten(1)], dim=1)[~full_N]
    before_NV = fades_SPV[open_N, (since_N - 1).clamp(min=0)].masked_fill((since_N == 0)[:, None], 0.0)
    fades_SPV[open_N, since_N] = before_NV + fade_NV[~full_N]


def states_now(
    state_NVKE: torch.Tensor, recent_NPF: torch.Tensor, fades_NPV: torch.Tensor, position_N: torch.Tensor
) -> torch.Tensor:
    """Return the states [N, V, K, E] in fp32 before these positions.

    Args:
        state_NVKE, recent_NPF, fades_NPV: As :func:`delta_step` left them for each sequence.
        position_N: int64, the position of each sequence's next token.
    """
    heads, key_size, size = state_NVKE.shape[1:]
    since_N = position_N % (recent_NPF.shape[1] + 1)
    past_NP1 = (torch.arange(recent_NPF.shape[1], device=since_N.device) < since_N[:, None])[..., None]
    last_N1V = (since_N - 1).clamp(min=0)[:, None, None].expand(-1, 1, heads)
    fade_N1V = fades_NPV.gather(1, last_N1V).masked_fill((since_N == 0)[:, None, None], 0.0)
    parts_NPV = (fade_N1V - fades_NPV).exp().masked_fill(~past_NP1, 0.0)
    recent_NPF = recent_NPF.float().masked_fill(~past_NP1, 0.0)
    keys_NPK, deltas_NPM = recent_NPF.split([recent_NPF.shape[2] - heads * size, heads * size], dim=2)
    keys_NPUK, deltas_NPVE = keys_NPK.unflatten(2, (-1, key_size)), deltas_NPM.unflatten(2, (heads, size))
    keys_NPVK = keys_NPUK.repeat_interleave(heads // keys_NPUK.shape[2], dim=2) * parts_NPV[..., None]
    faded_NVKE = state_NVKE.float() * fade_N1V.exp().transpose(1, 2)[..., None]
    return faded_NVKE + torch.einsum("npvk,npve->nvke", keys_NPVK, deltas_NPVE)


def gated_norm(
    out_TVE: torch.Tensor,
    z_TM: torch.Tensor,
    weight_E: torch.Tensor,
    y_TM: torch.Tensor,
    *,
    eps: float,
    padded_tokens: int = 0,
    a: LoraA = NO_A,
) -> None:
    """Write rmsnorm(out) * weight * silu(z) of each value head, as the output projection reads it.

    Args:
        out_TVE: fp32, as :func:`delta_step` left it.
        z_TM: fp32, as :func:`delta_inputs` left it.
        weight_E: fp32 weight of the norm, the same for all heads.
        y_TM: bf16, written, [T, M] or in the order of ``packed_gemm``, for which E is a multiple of 16.
        eps: Added to a head's mean square.
        padded_tokens: Tokens that ``y_TM`` has room for in the order of ``packed_gemm``; 0 for [T, M].
        a: LoRA of the output projection; each head writes a part of x A^T.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, heads, size = out_TVE.shape
    block_t, shared = 16, shared_bytes(out_TVE)
    arguments = pointers(
        "gated_norm", y_TM, out_TVE=out_TVE, z_TM=z_TM, weight_E=weight_E, a_RK=a.a_RK, y_TM=y_TM,
        parts_PTR=a.xa.parts_PTR,
    )  # fmt: skip
    _gated_norm[(heads, triton.cdiv(tokens, block_t))](
        *arguments, tokens, eps, V=heads, E=size, E_PADDED=_padded(size),
        **a.constants(rank_part(a.ranks, shared)),
        PADDED=padded_tokens, BLOCK_T=block_t, num_warps=4, **dependent(out_TVE),
    )  # fmt: skip
