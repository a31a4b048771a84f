"""The kernels of a gated delta net's decode step, against float64, and against transformers over whole steps.

They run on a GPU or in Triton's interpreter. Every case draws fresh random inputs and poisons its outputs, as
well as what nobody may read: slots of other sequences, and the ring before a sequence's first position.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from qerl.kernels.decode.delta_net import block_columns, delta_inputs, delta_step, gated_norm, states_now
from qerl.kernels.decode.launch import NO_A, LoraA, LoraB
from qerl.kernels.limits import STATE_TOKENS, pad_rank
from qerl.kernels.weights.product import LoraSum
from tests.support.kernels import DEVICE, EPS, HALF, as_rows, error, half, partial_sums, poison

pytestmark = pytest.mark.usefixtures("in_bounds")
WIDTH = 100  # over which the mean square is taken
AS_INT = {"device": DEVICE, "dtype": torch.int32}


def padded_ranks(matrix, rank, dim):
    """The matrix without the ranks that buffers have beyond an adapter's own."""
    index = torch.arange(matrix.shape[dim], device=DEVICE) < rank
    return torch.where(index if dim else index[:, None], matrix, 0.0)


def some_slots(tokens, slots):
    """Slots in random order, every third token without one, except where there is one token."""
    slot = torch.randperm(slots, device=DEVICE)[:tokens].to(torch.int32)
    slot[1::3] = -1
    return slot


SHAPES = [  # tokens, key heads, value heads per key head, K, E, rank, partial sums
    (1, 2, 1, 8, 16, 0, 3),
    (5, 1, 3, 24, 40, 8, 1),
    (17, 2, 2, 32, 32, 32, 3),
    (9, 1, 2, 48, 48, 8, 3),
    (70, 1, 2, 128, 64, 8, 3),
    (3, 2, 1, 64, 128, 0, 1),
]


@pytest.mark.parametrize(("tokens", "key_heads", "share", "key_size", "size", "rank", "splits"), SHAPES)
@pytest.mark.parametrize("taps", [4, 3])
def test_delta_inputs(tokens, key_heads, share, key_size, size, rank, splits, taps):
    heads, slots, ranks = key_heads * share, tokens + 3, pad_rank(rank) if rank else 0
    keys, values = key_heads * key_size, heads * size
    channels = 2 * keys + values
    product, summed, counts = partial_sums(splits, tokens, channels + values + 64, torch.float32)
    counts = counts if splits > 1 else None
    scale = torch.rand(2, device=DEVICE) + 0.5
    squares = torch.rand(3, tokens, device=DEVICE) * WIDTH + 1
    low = torch.randn(tokens, 2 * ranks + 2 * heads, device=DEVICE)
    b_NR = padded_ranks(half(channels + values, ranks), rank, 1) if rank else None
    conv = half(taps, channels)
    decay, dt_bias = -torch.rand(heads, device=DEVICE) * 16, torch.randn(heads, device=DEVICE)
    position = torch.randint(0, 11, (tokens,), **AS_INT)
    position[: min(3, tokens)] = torch.tensor([1, 2, 0], **AS_INT)[:tokens]
    slot = some_slots(tokens, slots)
    ring = poison(slots + 2, taps, channels, dtype=HALF)[1:-1]  # what is around it is nobody's argument
    earlier = torch.zeros(tokens, taps, channels, dtype=torch.float64, device=DEVICE)  # oldest first
    for t in range(tokens):
        for back in range(1, min(taps - 1, int(position[t])) + 1):
            x = half(channels)
            earlier[t, taps - 1 - back] = x.double()
            if slot[t] >= 0:
                ring[slot[t], (position[t] - back) % taps] = x
    before = ring.clone()
    found, z, gates = poison(tokens, channels), poison(tokens, values), poison(2, tokens, heads)
    delta_inputs(
        product, scale, squares, conv, decay, dt_bias, position, slot, ring, found, z, gates,
        key_heads=key_heads, width=WIDTH, eps=EPS, b=LoraB(LoraSum(sum_TR=low), b_NR), partials_G=counts,
    )  # fmt: skip
    rms = 1 / (squares.double().sum(0) / WIDTH + EPS).sqrt()[:, None]
    parts = list(summed[:, : channels + values].split([channels, values], 1))
    for i in range(2):
        parts[i] = parts[i] * scale[i].double()
        if rank:
            columns = low[:, i * ranks : (i + 1) * ranks].to(HALF).double()
            parts[i] = parts[i] + columns @ b_NR.double().split([channels, values])[i].T
    qkv, true_z = (part * rms for part in parts)
    gate = low[:, 2 * ranks :].double() * rms
    there = slot >= 0
    assert error(z, true_z) < 1e-5
    assert error(gates[1], gate[:, :heads].sigmoid()) < 1e-6
    assert error(gates[0], decay.double() * F.softplus(gate[:, heads:] + dt_bias.double())) < 1e-5

    earlier[:, -1] = qkv.to(HALF).double()
    y = F.conv1d(earlier.transpose(1, 2), conv.double().T[:, None], groups=channels)[..., 0]
    q, k, v = F.silu(y).split([keys, keys, values], 1)
    q, k = (theirs.l2norm(x.view(tokens, key_heads, key_size)).flatten(1) for x in (q, k))
    truth = torch.cat([q / key_size**0.5, k, v], 1)
    assert error(found[there], truth[there]) < (1e-5 if torch.float32 == HALF else 3e-3)

    own = (slot[there].long(), (position % taps)[there].long())
    assert error(ring[own], qkv[there]) < (1e-6 if torch.float32 == HALF else 3e-3)
    ring[own] = before[own]
    assert torch.equal(ring.nan_to_num(7.0), before.nan_to_num(7.0)), "another place was written"


def test_gates_are_exact_where_softplus_is_tiny_and_where_it_is_its_argument():
    """1 + exp(-17) is 1 in FP32, and exp(100) is infinite."""
    a = torch.tensor([-60.0, -30.0, -17.0, -9.0, -1.0, 0.0, 1.0, 19.0, 21.0, 100.0], device=DEVICE)
    tokens, heads, size = len(a), 1, 16
    for t in range(tokens):
        decay = -1 / F.softplus(a[t].double())
        low = torch.stack([torch.zeros_like(a), a], 1)[t, None].contiguous()
        gates = poison(2, 1, heads)
        delta_inputs(
            torch.zeros(1, 1, 4 * size, device=DEVICE), torch.ones(2, device=DEVICE),
            torch.empty(0, 1, device=DEVICE), half(4, 3 * size), decay.float()[None],
            torch.zeros(heads, device=DEVICE), torch.zeros(1, **AS_INT), torch.zeros(1, **AS_INT),
            half(1, 4, 3 * size), poison(1, 3 * size), poison(1, size), gates,
            key_heads=1, width=WIDTH, eps=EPS, b=LoraB(LoraSum(sum_TR=low)),
        )  # fmt: skip
        truth = decay.float().double() * F.softplus(a[t].double())
        bound = 1e-6 + abs(float(a[t])) * 2**-23  # a GPU's exp is 2^(x log2(e)), whose argument is rounded
        assert abs(float(gates[0, 0, 0]) / float(truth) - 1) < bound, f"a = {float(a[t])}"
        assert gates[1, 0, 0] == 0.5


@pytest.mark.parametrize(
    ("tokens", "key_heads", "share", "key_size", "size"), [shape[:5] for shape in SHAPES]
)
def test_delta_step(tokens, key_heads, share, key_size, size):
    """Each token's step, wherever the last write of its state was, and the state as it is read later."""
    heads, slots, dtype = key_heads * share, tokens + 3, HALF
    slot, position = some_slots(tokens, slots), torch.randint(0, 50, (tokens,), **AS_INT)
    position[: min(4, tokens)] = torch.tensor([7, 8, 6, 0], **AS_INT)[:tokens]
    there = slot >= 0
    at, since = slot[there].long(), (position % STATE_TOKENS)[there].tolist()
    q, k = (theirs.l2norm(torch.randn(tokens, key_heads, key_size, device=DEVICE)) for _ in range(2))
    v = torch.randn(tokens, heads, size, device=DEVICE)
    gates = torch.stack([-torch.rand(tokens, heads, device=DEVICE), torch.rand(tokens, heads, device=DEVICE)])
    state = poison(slots + 2, heads, key_size, size, dtype=dtype)[1:-1]
    state[at] = torch.randn(len(at), heads, key_size, size, device=DEVICE).to(dtype)
    recent = poison(slots + 2, STATE_TOKENS - 1, key_heads * key_size + heads * size, dtype=dtype)[1:-1]
    fades = poison(slots + 2, STATE_TOKENS - 1, heads)[1:-1]
    keys, deltas = recent.split([key_heads * key_size, heads * size], 2)
    known = []  # the states that the tokens meet, in float64
    for i, past in zip(at, since, strict=True):
        own_k = theirs.l2norm(torch.randn(past, key_heads, key_size, device=DEVICE)).to(dtype)
        own_d, own_g = (torch.randn(past, heads, n, device=DEVICE).to(dtype) for n in (size, 1))
        own_g = -own_g.float().abs()
        keys[i, :past], deltas[i, :past] = own_k.flatten(1), own_d.flatten(1)
        fades[i, :past] = own_g[..., 0].cumsum(0)
        meets = state[i].double()
        for one_k, one_d, one_g in zip(own_k.double(), own_d.double(), own_g.double(), strict=True):
            written = one_k.repeat_interleave(share, 0)[..., None] * one_d[:, None]
            meets = meets * one_g.exp()[..., None] + written
        known.append(meets)
    before, ring_before, fades_before = state.clone(), recent.clone(), fades.clone()
    rows = torch.cat([(q * key_size**-0.5).flatten(1), k.flatten(1), v.flatten(1)], 1)
    rows[~there], gates[:, ~there] = float("nan"), float("nan")
    out = poison(tokens, heads, size)
    found = states_now(state[at], recent[at], fades[at], position[there].long())
    assert error(found, torch.stack(known)) < 1e-5
    delta_step(rows, gates, state, recent, fades, position, slot, out)
    truth, following = (
        torch.cat(each)
        for each in zip(*(
            step_in_float64(*(x[t].double() for x in (q, k, v, gates[0], gates[1])), meets)
            for t, meets in zip(there.nonzero()[:, 0].tolist(), known, strict=True)
        ), strict=True)
    )  # fmt: skip
    assert error(out[there], truth) < 1e-5
    assert not out[~there].any()
    found = states_now(state[at], recent[at], fades[at], position[there].long() + 1)
    assert error(found, following) < (1e-5 if dtype == torch.float32 else 4e-3)
    for i, past in zip(at, since, strict=True):
        if past == STATE_TOKENS - 1:
            assert not torch.equal(state[i], before[i])
            state[i] = before[i]
        else:
            recent[i, past], fades[i, past] = ring_before[i, past], fades_before[i, past]
    assert torch.equal(state.nan_to_num(7.0), before.nan_to_num(7.0)), "another slot was written"
    for ring, untouched in ((recent, ring_before), (fades, fades_before)):
        assert torch.equal(ring.nan_to_num(7.0), untouched.nan_to_num(7.0)), "another place was written"


def step_in_float64(q, k, v, g, beta, state):
    """Output [1, V, E] of one token and the state [1, V, K, E] behind it, as the paper has them."""
    q, k = (x.repeat_interleave(len(v) // len(x), 0) for x in (q, k))
    state = state * g.exp()[:, None, None]
    delta = beta[:, None] * (v - torch.einsum("vke,vk->ve", state, k))
    state = state + k[..., None] * delta[:, None]
    return torch.einsum("vke,vk->ve", state, q)[None] / q.shape[-1] ** 0.5, state[None]


def test_blocks_divide_a_state():
    assert [block_columns(size) for size in (16, 40, 48, 64, 80, 128, 192)] == [16, 40, 48, 64, 40, 64, 64]


@pytest.mark.parametrize(
    ("tokens", "heads", "size", "rank", "padded"),
    [(1, 2, 16, 0, 0), (5, 4, 48, 8, 8), (70, 2, 128, 32, 128), (17, 4, 40, 32, 0)],
)
def test_gated_norm(tokens, heads, size, rank, padded):
    out, z = torch.randn(tokens, heads, size, device=DEVICE), torch.randn(tokens, heads * size, device=DEVICE)
    out[0] = 0.0  # of a token without a slot
    weight, inner, a, parts = torch.rand(size, device=DEVICE) + 0.5, heads * size, None, None
    y = poison(tokens, inner, dtype=HALF)
    if padded:
        y = torch.zeros(padded * inner, device=DEVICE, dtype=HALF)
    if rank:
        a, parts = padded_ranks(half(pad_rank(rank), inner), rank, 0), poison(heads, tokens, pad_rank(rank))
    lora = LoraA(a, LoraSum(parts)) if rank else NO_A
    gated_norm(out, z, weight, y, eps=EPS, padded_tokens=padded, a=lora)
    y = as_rows(y, tokens, inner, padded)
    gate = F.silu(z.double()).view(tokens, heads, size)
    truth = F.rms_norm(out.double(), (size,), weight.double(), EPS) * gate
    if tokens > 1:
        assert error(y.view(tokens, heads, size), truth) < (1e-6 if torch.float32 == HALF else 3e-3)
    assert not y[0].any()
    if rank:
        each = torch.stack([y[:, c].double() @ a[:, c].double().T for c in torch.arange(inner).split(size)])
        assert error(parts, each) < 1e-5


@pytest.mark.parametrize("share", [1, 2, 3])
def test_steps_are_a_layer_of_transformers(share):
    """Three sequences token by token, in other rows and slots at each step, one of them ending early and one
    entering late, against the module on whole sequences."""
    config = Qwen3_5TextConfig(
        hidden_size=48, linear_num_key_heads=2, linear_num_value_heads=2 * share, linear_key_head_dim=16,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, num_hidden_layers=1,
        layer_types=["linear_attention"], rms_norm_eps=EPS,
    )  # fmt: skip
    layer = theirs.Qwen3_5GatedDeltaNet(config, 0).float().to(DEVICE)
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) * parameter[0].numel() ** -0.5
    for linear in (layer.in_proj_b, layer.in_proj_a, layer.conv1d):
        linear.weight.data = linear.weight.data.to(HALF).float()
    heads, channels, inner = layer.num_v_heads, layer.conv_dim, layer.value_dim
    length, first, last = 21, [0, 2, 0], [21, 21, 5]
    u = torch.randn(3, length, 48, device=DEVICE)
    norm = u.square().mean(-1, keepdim=True)
    h = u / (norm + EPS).sqrt()
    truth = [layer(h[i : i + 1, first[i] : last[i]])[0].detach() for i in range(3)]

    rows, slots = 4, [5, 0, 3]
    ring, state = poison(6, 4, channels, dtype=HALF), poison(6, heads, 16, 32, dtype=HALF)
    found, z, gates = poison(rows, channels), poison(rows, inner), poison(2, rows, heads)
    recent = poison(6, STATE_TOKENS - 1, 2 * 16 + heads * 32, dtype=HALF)
    fades = poison(6, STATE_TOKENS - 1, heads)
    out, y = poison(rows, heads, 32), poison(rows, inner, dtype=HALF)
    stacked = torch.cat([layer.in_proj_qkv.weight, layer.in_proj_z.weight]).detach()
    tiny = torch.cat([layer.in_proj_b.weight, layer.in_proj_a.weight]).detach()
    decay, conv = -layer.A_log.detach().exp(), layer.conv1d.weight.detach()[:, 0].T.contiguous().to(HALF)
    for slot in slots:
        state[slot] = 0.0
    given: list[list[torch.Tensor]] = [[], [], []]
    for step in range(length):
        running = [i for i in range(3) if first[i] <= step < last[i]]
        order = torch.randperm(rows)[: len(running)].tolist()
        x, slot, position = (
            torch.zeros(rows, 48, device=DEVICE),
            torch.full((rows,), -1, **AS_INT),
            [99] * rows,
        )
        for row, i in zip(order, running, strict=True):
            x[row], slot[row], position[row] = u[i, step], slots[i], step - first[i]
        delta_inputs(
            (x @ stacked.T)[None], torch.ones(2, device=DEVICE), x.square().sum(1)[None], conv,
            decay, layer.dt_bias.detach(), torch.tensor(position, **AS_INT), slot, ring, found, z, gates,
            key_heads=2, width=48, eps=EPS, b=LoraB(LoraSum(sum_TR=x @ tiny.T)),
        )  # fmt: skip
        delta_step(found, gates, state, recent, fades, torch.tensor(position, **AS_INT), slot, out)
        gated_norm(out, z, layer.norm.weight.detach(), y, eps=EPS)
        for row, i in zip(order, running, strict=True):
            given[i].append(y[row].float() @ layer.out_proj.weight.detach().T)
    for sequence, exact in zip(given, truth, strict=True):
        if torch.float32 == HALF:
            assert all(error(one, other) < 1e-5 for one, other in zip(sequence, exact, strict=True))
        else:  # a norm behind a head whose output happens to be small enlarges what was rounded
            assert error(torch.stack(sequence), exact) < 2e-2
