"""Attention whose output has a gate: what rope_kv makes of the product, and combine_splits of the gates.

They run on a GPU or in Triton's interpreter and are compared with float64; outputs are poisoned.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.errors import QeRLError
from qerl.kernels.decode.attend import combine_splits
from qerl.kernels.decode.launch import NO_A, NO_B, LoraA, LoraB
from qerl.kernels.decode.rope_kv import Heads, rope_kv
from qerl.kernels.limits import pad_rank
from qerl.kernels.weights.product import LoraSum
from tests.support.kernels import DEVICE, EPS, HALF, as_rows, error, half, poison

pytestmark = pytest.mark.usefixtures("in_bounds")
AS_INT = {"device": DEVICE, "dtype": torch.int32}
EXACT = torch.float32 == HALF


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "rank", "splits", "bias", "k_is_v"),
    [
        (1, 4, 2, 32, 0, 1, False, False),
        (5, 6, 2, 64, 8, 3, True, False),
        (18, 2, 1, 80, 32, 3, False, False),
        (18, 4, 2, 64, 8, 2, True, True),
    ],
)
def test_rope_kv_finishes_gates_and_all_else_behind_them(
    tokens, heads, kv_heads, size, rank, splits, bias, k_is_v
):
    """A quarter of each head is turned, as in these models."""
    width, pairs, ranks = 100, size // 8, pad_rank(rank) if rank else 0
    outputs = [2 * heads * size, kv_heads * size, *([] if k_is_v else [kv_heads * size])]
    columns, linears = sum(outputs), len(outputs)
    product = torch.randn(splits, tokens, columns, device=DEVICE)
    counts = torch.randint(1, splits + 1, (-(-columns // 64),), **AS_INT)
    unused = torch.arange(splits, device=DEVICE)[:, None] >= counts.repeat_interleave(64)[None, :columns]
    summed = product.masked_fill(unused[:, None], 0.0).double().sum(0)
    product.masked_fill_(unused[:, None], float("nan"))
    scale = torch.rand(linears, device=DEVICE) + 0.5
    squares = torch.rand(3, tokens, device=DEVICE) * width + 1
    low, b_NR = torch.randn(tokens, linears * ranks, device=DEVICE), half(columns, ranks) if rank else None
    bias_N = half(columns) if bias else None
    norm_2E = torch.rand(2, size, device=DEVICE) + 0.5
    angle = torch.rand(50, pairs, device=DEVICE) * 6
    position = torch.randint(0, 50, (tokens,), **AS_INT)
    slot = torch.randperm(3 * 64, device=DEVICE)[:tokens].to(torch.int32)
    slot[1::3] = -1
    q, gate = poison(tokens, heads, size, dtype=HALF), poison(tokens, heads, size)
    caches = [torch.zeros(3, kv_heads, 64, size, device=DEVICE, dtype=HALF) for _ in range(2)]
    rope_kv(
        product, scale, squares, angle.cos(), angle.sin(), position, slot, q, *caches, width=width, eps=EPS,
        heads=Heads(norm_N=norm_2E, turned=(pairs, pairs), k_is_v=k_is_v, gated=True), gate_THE=gate,
        partials_G=counts if splits > 1 else None, bias_N=bias_N,
        b=LoraB(LoraSum(sum_TR=low), b_NR) if rank else NO_B,
    )  # fmt: skip

    parts = list(summed.split(outputs, 1))
    for i in range(linears):
        parts[i] = parts[i] * scale[i].double()
        if rank:
            columns_R = low[:, i * ranks : (i + 1) * ranks].to(HALF).double()
            parts[i] = parts[i] + columns_R @ b_NR.double().split(outputs)[i].T
        parts[i] = parts[i] / (squares.double().sum(0) / width + EPS).sqrt()[:, None]
        if bias:
            parts[i] = parts[i] + bias_N.double().split(outputs)[i]
    true_q, true_gate = parts[0].view(tokens, heads, 2 * size).chunk(2, -1)
    k = parts[1].view(tokens, kv_heads, size)
    v = k if k_is_v else parts[2].view(tokens, kv_heads, size)
    cos, sin = (f(angle.double())[position.long()][:, None] for f in (torch.cos, torch.sin))

    def turned(x, weight):
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        x1, x2, rest = x.split([pairs, pairs, size - 2 * pairs], -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1)

    bound = 1e-5 if EXACT else 4e-3
    assert error(gate, true_gate) < 1e-5
    assert error(q, turned(true_q, norm_2E[0])) < bound
    places = [(t, s // 64, s % 64) for t, s in enumerate(slot.tolist()) if s >= 0]
    for cache, truth in zip(caches, (turned(k, norm_2E[1]), v), strict=True):
        found = torch.stack([cache[page, :, place] for _, page, place in places])
        assert error(found, truth[[t for t, *_ in places]]) < bound
        assert int((cache != 0).any(-1).sum()) == len(places) * kv_heads, "another place was written"


@pytest.mark.parametrize(
    ("tokens", "heads", "size", "rank", "padded", "sinks", "gated"),
    [
        (1, 2, 32, 0, 0, False, True),
        (5, 4, 48, 8, 8, True, True),
        (8, 4, 80, 272, 8, False, False),
        (9, 4, 48, 8, 16, True, False),
        (18, 2, 256, 32, 32, False, True),
        (18, 2, 80, 32, 0, False, True),
    ],
)
def test_combine_splits_adds_splits_and_multiplies_by_the_gate(
    tokens, heads, size, rank, padded, sinks, gated
):
    """Up to 8 tokens a program has one token, and 16 of more."""
    splits, inner, a, parts = 4, heads * size, None, None
    out, lse = torch.randn(splits, tokens, heads, size, device=DEVICE), torch.randn(splits, tokens, heads)
    lse[1, ::2] = -torch.inf
    out[1, ::2] = float("nan")  # a split without keys
    lse, gate = lse.to(DEVICE), torch.randn(tokens, heads, size, device=DEVICE) * 3 if gated else None
    sink_H = torch.randn(heads, device=DEVICE) if sinks else None
    y = poison(tokens, inner, dtype=HALF)
    if padded:
        y = torch.zeros(padded * inner, device=DEVICE, dtype=HALF)
    if rank:
        a, parts = half(pad_rank(rank), inner), poison(heads, tokens, pad_rank(rank))
    lora = LoraA(a, LoraSum(parts)) if rank else NO_A
    combine_splits(out, lse, y, padded_tokens=padded, sink_H=sink_H, gate_THE=gate, a=lora)
    y = as_rows(y, tokens, inner, padded)
    weight = lse.double().exp()
    total = weight.sum(0) + (sink_H.double().exp() if sinks else 0.0)
    truth = torch.where(weight[..., None] > 0, out, 0.0).double() * weight[..., None] / total[..., None]
    truth = truth.sum(0) * (gate.double().sigmoid() if gated else 1.0)
    assert error(y.view(tokens, heads, size), truth) < (1e-6 if EXACT else 3e-3)
    if rank:
        each = torch.stack([y[:, c].double() @ a[:, c].double().T for c in torch.arange(inner).split(size)])
        assert error(parts, each) < 1e-5


def test_gates_without_a_buffer_and_with_a_norm_of_all_heads_are_refused():
    with pytest.raises(QeRLError, match="no gate_THE for heads with gated=True"):
        rope_kv(*[torch.zeros(1)] * 10, width=1, eps=EPS, heads=Heads(gated=True))
    with pytest.raises(QeRLError, match="a gate_THE for heads with gated=False"):
        rope_kv(*[torch.zeros(1)] * 10, width=1, eps=EPS, gate_THE=torch.zeros(1))
    with pytest.raises(QeRLError, match="norm of all heads together"):
        Heads(gated=True, squares_PT=torch.zeros(1, 1))
