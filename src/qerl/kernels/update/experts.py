"""Kernels around the products of experts in the update: gates, and weighted sums, with their gradients.

A pair is a token with one of its experts. Products read and write pairs sorted by expert, and a token's C
pairs are found by their places in that order. The weights that a product reads lack the factor of their
linear, so that factor is applied to the product's output, in FP32, and biases are added to the output as
well, in FP32 too.

    h = (act(gate) up)(factor y + bias)                       # gate_pairs, gate_pairs_backward
    out = sum over a token's pairs of weight (factor z + bias)  # add_pairs, add_pairs_backward

Backward keeps y and z. A token's pairs are added in a fixed order, so nothing depends on timing.

Shapes: S pairs, T tokens, C experts per token, S = T C, E experts, D hidden, I intermediate size.
"""

import torch
import triton
import triton.language as tl

from qerl.families.layer import Clamp
from qerl.kernels.launch import pointers

_BLOCK = 1024


@triton.jit
def gate_and_up(
    y_SN, factor_E2, bias_EN, s, expert, i, inside, INNER, limit, BIAS: tl.constexpr, CLAMP: tl.constexpr
):
    """Gate and up in fp32, and whether each is within its limits."""
    at = y_SN + s * (2 * INNER) + i
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor_E2 + 2 * expert)
    up = tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32) * tl.load(factor_E2 + 2 * expert + 1)
    if BIAS:
        at = bias_EN + expert * (2 * INNER) + i
        gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(at + INNER, mask=inside, other=0.0).to(tl.float32)
    free_gate, free_up = gate == gate, up == up
    if CLAMP:
        free_gate, free_up = gate <= limit, (up <= limit) & (up >= -limit)
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    return gate, up, free_gate, free_up


@triton.jit
def _gate_pairs(
    y_SN, factor_E2, bias_EN, expert_S, h_SI, INNER, slope, limit,
    BIAS: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, expert = i < INNER, tl.load(expert_S + s).to(tl.int64)
    gate, up, _, _ = gate_and_up(y_SN, factor_E2, bias_EN, s, expert, i, inside, INNER, limit, BIAS, CLAMP)
    tl.store(h_SI + s * INNER + i, gate * tl.sigmoid(gate * slope) * up, mask=inside)


@triton.jit
def _gate_pairs_backward(
    dh_SI, y_SN, factor_E2, bias_EN, expert_S, dy_SN, INNER, slope, limit,
    BIAS: tl.constexpr, CLAMP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, expert = i < INNER, tl.load(expert_S + s).to(tl.int64)
    gate, up, free_gate, free_up = gate_and_up(
        y_SN, factor_E2, bias_EN, s, expert, i, inside, INNER, limit, BIAS, CLAMP
    )
    dh = tl.load(dh_SI + s * INNER + i, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate * slope)
    dgate = dh * up * (sigmoid + gate * slope * sigmoid * (1.0 - sigmoid))
    dgate = tl.where(free_gate, dgate, 0.0) * tl.load(factor_E2 + 2 * expert)
    dup = tl.where(free_up, dh * gate * sigmoid, 0.0) * tl.load(factor_E2 + 2 * expert + 1)
    at = dy_SN + s * (2 * INNER) + i
    tl.store(at, dgate, mask=inside)
    tl.store(at + INNER, dup, mask=inside)


def gate_pairs(
    y_SN: torch.Tensor,
    factor_E2: torch.Tensor,
    bias_EN: torch.Tensor | None,
    expert_S: torch.Tensor,
    clamp: Clamp | None,
) -> torch.Tensor:
    """Return ``silu(gate) up`` of each pair, or the activation of ``clamp``: [S, I] in the dtype of ``y``.

    Args:
        y_SN: Columns 0..I gate and I..2I up, without factors and biases.
        factor_E2: fp32, factors of each expert's gate and up.
        bias_EN: Biases of gate and up; None without.
        expert_S: int32, each pair's expert.
        clamp: Activation between the products; None for SwiGLU.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    pairs, inner = y_SN.shape[0], y_SN.shape[1] // 2
    h_SI = y_SN.new_empty(pairs, inner)
    arguments = pointers(
        "gate_pairs", y_SN, y_SN=y_SN, factor_E2=factor_E2, bias_EN=bias_EN, expert_S=expert_S, h_SI=h_SI
    )
    _gate_pairs[(pairs, triton.cdiv(inner, _BLOCK))](
        *arguments, inner, *(clamp or (1.0, 0.0)), BIAS=bias_EN is not None, CLAMP=clamp is not None,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return h_SI


def gate_pairs_backward(
    dh_SI: torch.Tensor,
    y_SN: torch.Tensor,
    factor_E2: torch.Tensor,
    bias_EN: torch.Tensor | None,
    expert_S: torch.Tensor,
    clamp: Clamp | None,
) -> torch.Tensor:
    """Return the gradient [S, 2 I] with respect to ``y``; arguments as in :func:`gate_pairs`.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    pairs, inner = dh_SI.shape
    dy_SN = torch.empty_like(y_SN)
    arguments = pointers(
        "gate_pairs_backward", y_SN, dh_SI=dh_SI, y_SN=y_SN, factor_E2=factor_E2, bias_EN=bias_EN,
        expert_S=expert_S, dy_SN=dy_SN,
    )  # fmt: skip
    _gate_pairs_backward[(pairs, triton.cdiv(inner, _BLOCK))](
        *arguments, inner, *(clamp or (1.0, 0.0)), BIAS=bias_EN is not None, CLAMP=clamp is not None,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return dy_SN


@triton.jit
def _add_pairs(
    z_SD, place_TC, weight_TC, expert_TC, factor_E, bias_ED, out_TD, D,
    C: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    total = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(C):
        place = tl.load(place_TC + t * C + c).to(tl.int64)
        z = tl.load(z_SD + place * D + d, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            expert = tl.load(expert_TC + t * C + c).to(tl.int64)
            z *= tl.load(factor_E + expert)
            if BIAS:
                z += tl.load(bias_ED + expert * D + d, mask=inside, other=0.0).to(tl.float32)
            z *= tl.load(weight_TC + t * C + c).to(tl.float32)
        total += z
    tl.store(out_TD + t * D + d, total, mask=inside)


@triton.jit
def _add_pairs_backward(
    dout_TD, z_SD, place_TC, weight_TC, expert_TC, factor_E, bias_ED, dz_SD, dweight_TC, D,
    C: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    place, expert = tl.load(place_TC + pair).to(tl.int64), tl.load(expert_TC + pair).to(tl.int64)
    factor, weight = tl.load(factor_E + expert), tl.load(weight_TC + pair).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        d = first + tl.arange(0, BLOCK)
        inside = d < D
        dout = tl.load(dout_TD + pair // C * D + d, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_SD + place * D + d, mask=inside, other=0.0).to(tl.float32) * factor
        if BIAS:
            z += tl.load(bias_ED + expert * D + d, mask=inside, other=0.0).to(tl.float32)
        total += dout * z
        tl.store(dz_SD + place * D + d, dout * weight * factor, mask=inside)
    tl.store(dweight_TC + pair, tl.sum(total, axis=0))


def add_pairs(
    z_SD: torch.Tensor,
    place_TC: torch.Tensor,
    weight_TC: torch.Tensor | None = None,
    expert_TC: torch.Tensor | None = None,
    factor_E: torch.Tensor | None = None,
    bias_ED: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum [T, D] of each token's pairs, in the dtype of ``z``.

    Args:
        z_SD: Product of each pair, without factors and biases.
        place_TC: int32, the places of each token's pairs.
        weight_TC: Weight of each pair, applied last; None for a plain sum, without the arguments below.
        expert_TC: int32, the experts of each token's pairs.
        factor_E: fp32, factor of each expert's last linear.
        bias_ED: Bias of each expert; None without.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    (tokens, chosen), width = place_TC.shape, z_SD.shape[1]
    out_TD = z_SD.new_empty(tokens, width)
    arguments = pointers(
        "add_pairs", z_SD, z_SD=z_SD, place_TC=place_TC, weight_TC=weight_TC, expert_TC=expert_TC,
        factor_E=factor_E, bias_ED=bias_ED, out_TD=out_TD,
    )  # fmt: skip
    _add_pairs[(tokens, triton.cdiv(width, _BLOCK))](
        *arguments, width, C=chosen, WEIGHTED=weight_TC is not None, BIAS=bias_ED is not None, BLOCK=_BLOCK
    )
    return out_TD


def add_pairs_backward(
    dout_TD: torch.Tensor,
    z_SD: torch.Tensor,
    place_TC: torch.Tensor,
    weight_TC: torch.Tensor,
    expert_TC: torch.Tensor,
    factor_E: torch.Tensor,
    bias_ED: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients [S, D] with respect to ``z`` and, in fp32, [T, C] to the weights.

    Arguments are as in :func:`add_pairs`.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    chosen, width = place_TC.shape[1], z_SD.shape[1]
    dz_SD, dweight_TC = torch.empty_like(z_SD), torch.empty_like(weight_TC, dtype=torch.float32)
    arguments = pointers(
        "add_pairs_backward", z_SD, dout_TD=dout_TD, z_SD=z_SD, place_TC=place_TC, weight_TC=weight_TC,
        expert_TC=expert_TC, factor_E=factor_E, bias_ED=bias_ED, dz_SD=dz_SD, dweight_TC=dweight_TC,
    )  # fmt: skip
    _add_pairs_backward[(place_TC.numel(),)](
        *arguments, width, C=chosen, BIAS=bias_ED is not None, BLOCK=_BLOCK
    )
    return dz_SD, dweight_TC
