"""Kernels of the decode step against float64, on a GPU or, small, in Triton's interpreter.

Every case draws fresh random inputs and poisons its outputs.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.errors import QeRLError
from qerl.kernels.decode import act_mul, residual_norm, rope_kv
from qerl.kernels.decode import attend as attention
from qerl.kernels.decode.draw import RowState, draw_token
from qerl.kernels.decode.filters import RowSettings
from qerl.kernels.decode.launch import NO_B, LoraA, LoraB
from qerl.kernels.weights.product import LoraSum
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.rows import write_settings
from tests.support.kernels import (
    DEVICE,
    EPS,
    GPU,
    HALF,
    as_rows,
    error,
    half,
    partial_sums,
    poison,
    without_fp8,
)  # fmt: skip


def low_of(parts_PTR):
    return parts_PTR.double().sum(0)


@pytest.mark.parametrize(
    "tokens,splits,rank,padded", [(3, 2, 16, 8), (17, 1, 0, 0), (40, 3, 32, 64), (130, 6, 16, 256)]
)
def test_residual_norm(tokens, splits, rank, padded):
    width, stacked = 256, 3 * rank
    product, summed, counts = partial_sums(splits, tokens, width)
    scale = torch.rand(1, device=DEVICE) + 0.5
    residual = torch.randn(tokens, width, device=DEVICE)
    w = torch.rand(width, device=DEVICE) + 0.5
    low, b, a = (
        torch.randn(tokens, max(rank, 1), device=DEVICE),
        half(width, max(rank, 1)),
        half(stacked, width),
    )
    y = residual.double() + summed * scale.double()
    u = (
        torch.zeros(padded * width, device=DEVICE, dtype=HALF)
        if padded
        else poison(tokens, width, dtype=HALF)
    )
    squares = poison(width // residual_norm.block_d(tokens), tokens)
    lora = {}
    if rank:
        y = y + low.to(HALF).double() @ b.double().T
        following = poison(len(squares), tokens, stacked)
        lora = {"b": LoraB(LoraSum(sum_TR=low), b), "a": LoraA(a, LoraSum(following))}
    found = residual.clone()
    residual_norm.residual_norm(
        found, w, u, squares, padded_tokens=padded, gemm_STN=product, partials_G=counts, scale_1=scale, **lora
    )
    u = as_rows(u, tokens, width, padded)
    assert error(found, y) < 1e-6
    rounded = found.double()
    assert error(squares.sum(0), rounded.square().sum(1)) < 1e-5
    assert error(u, rounded * w.double()) < 3e-3
    if rank:
        assert error(low_of(following), u.double() @ a.double().T) < 1e-5


def test_residual_norm_reads_the_embedding():
    table, tokens = half(50, 128), torch.tensor([3, 49, 3], device=DEVICE, dtype=torch.int32)
    found, u, squares = poison(3, 128), poison(3, 128, dtype=HALF), poison(2, 3)
    residual_norm.residual_norm(found, torch.ones(128, device=DEVICE), u, squares, embedding=(table, tokens))
    assert torch.equal(found, table[tokens.long()].float())


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "size,qk_norm,bias,rank,cached,sums",
    [
        (64, False, True, 16, HALF, torch.float32),
        (64, True, False, 0, HALF, torch.bfloat16),
        pytest.param(64, False, True, 0, FP8, torch.float32, marks=without_fp8),
        (80, True, True, 16, HALF, torch.float32),
    ],
)
def test_rope_kv(size, qk_norm, bias, rank, cached, sums):
    tokens, heads, kv_heads, splits, width = 5, 6, 2, 2, 384
    columns = (heads + 2 * kv_heads) * size
    product, summed, counts = partial_sums(splits, tokens, columns, sums)
    scale = torch.rand(3, device=DEVICE) + 0.5
    squares = torch.rand(3, tokens, device=DEVICE) * width / 3 + 1
    low, b = torch.randn(tokens, 3 * max(rank, 1), device=DEVICE), half(columns, max(rank, 1))
    bias_N = half(columns) if bias else None
    norm_2E = torch.rand(2, size, device=DEVICE) + 0.5 if qk_norm else None
    angle = torch.rand(100, size // 2, device=DEVICE) * 6
    position = torch.randint(0, 100, (tokens,), device=DEVICE, dtype=torch.int32)
    slot = torch.tensor([64, 3, -1, 191, 65], device=DEVICE, dtype=torch.int32)
    q = poison(tokens, heads, size, dtype=HALF)
    k_cache, v_cache = (torch.zeros(3, kv_heads, 64, size, device=DEVICE).to(cached) for _ in range(2))
    if cached == FP8:
        product[0, 0] *= 1e3  # beyond 448
        summed[0] = summed[0] + (1 - 1e-3) * product[0, 0].double()
    rope_kv.rope_kv(
        product, scale, squares, angle.cos(), angle.sin(), position, slot, q, k_cache, v_cache, width=width,
         eps=EPS, heads=rope_kv.Heads(norm_N=norm_2E), partials_G=counts, bias_N=bias_N,
        b=LoraB(LoraSum(sum_TR=low), b) if rank else NO_B,
    )  # fmt: skip
    x = summed
    parts = list(x.split([heads * size, kv_heads * size, kv_heads * size], dim=1))
    lows = low.to(HALF).double().split(max(rank, 1), dim=1)
    bs = b.double().split([heads * size, kv_heads * size, kv_heads * size])
    rms = 1 / (squares.double().sum(0) / width + EPS).sqrt()
    for i in range(3):
        parts[i] = parts[i] * scale[i].double()
        if rank:
            parts[i] = parts[i] + lows[i] @ bs[i].T
    x = torch.cat(parts, 1) * rms[:, None]
    if bias:
        x = x + bias_N.double()
    x = x.view(tokens, -1, size)
    for first, last, row in ((0, heads, 0), (heads, heads + kv_heads, 1)):
        part = x[:, first:last].clone()
        if qk_norm:
            part = part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_2E[row].double()
        cos, sin = (f(angle.double())[position.long()][:, None] for f in (torch.cos, torch.sin))
        x1, x2 = part.chunk(2, -1)
        x[:, first:last] = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    assert error(q, x[:, :heads]) < 3e-3
    # The interpreter loses the carry where rounding to E4M3 reaches the next power of two.
    x, bound = (x.clamp(-448, 448), 4e-2 if GPU else 0.2) if cached == FP8 else (x, 4e-3)
    k_cache, v_cache = k_cache.float(), v_cache.float()
    assert cached != FP8 or k_cache.abs().max() == 448
    for t, s in enumerate(slot.tolist()):
        if s >= 0:
            assert error(k_cache[s // 64, :, s % 64], x[t, heads : heads + kv_heads]) < bound
            assert error(v_cache[s // 64, :, s % 64], x[t, heads + kv_heads :]) < bound
    assert int((k_cache != 0).any(-1).sum()) == 4 * kv_heads


@without_fp8
@pytest.mark.skipif(not GPU, reason="the interpreter's cast to E4M3 knows no NaN")
def test_nan_stays_nan_in_an_fp8_cache():
    tokens, size = 2, 64
    product = torch.randn(1, tokens, 3 * size, device=DEVICE)
    product[0, 1, size + 3], product[0, 1, 2 * size + 5] = float("nan"), float("nan")
    caches = [torch.zeros(1, 1, 64, size, device=DEVICE).to(FP8) for _ in range(2)]
    as_int = {"device": DEVICE, "dtype": torch.int32}
    rope_kv.rope_kv(
        product, torch.ones(3, device=DEVICE), torch.ones(1, tokens, device=DEVICE),
        torch.ones(4, size // 2, device=DEVICE), torch.zeros(4, size // 2, device=DEVICE),
        torch.tensor([0, 1], **as_int), torch.tensor([0, 1], **as_int),
        poison(tokens, 1, size, dtype=HALF), *caches, width=1, eps=0.0,
    )  # fmt: skip
    for cache in caches:
        assert not cache[0, 0, 0].float().isnan().any() and cache[0, 0, 1].float().isnan().any()


@pytest.mark.parametrize(
    "tokens,rank,padded,intermediate,sums",
    [
        (3, 16, 8, 192, None),  # a block of columns and a half
        (20, 0, 0, 192, None),
        (20, 16, 32, 192, None),
        (70, 16, 0, 192, None),
        (150, 16, 256, 1216, None),  # walks of two blocks of columns and of three
        (260, 16, 512, 192, None),
        (150, 16, 0, 1216, torch.float32),
        (150, 256, 256, 576, None),
        (150, 16, 0, 208, None),  # no whole number of blocks to walk along
    ],
)
@pytest.mark.parametrize("gelu", [False, True])
def test_act_mul(tokens, rank, padded, intermediate, sums, gelu, monkeypatch):
    monkeypatch.setattr(act_mul, "multiprocessors", lambda device: 8)  # as where there is no GPU
    width, splits = 100, 2
    product, summed, counts = partial_sums(splits, tokens, 2 * intermediate + 64, sums)
    scale = torch.rand(2, device=DEVICE) + 0.5
    squares = torch.rand(2, tokens, device=DEVICE) * width + 1
    low, b = (
        torch.randn(tokens, 2 * max(rank, 1), device=DEVICE),
        half(2 * intermediate, max(rank, 1), scale=0.3),
    )
    a = half(max(rank, 1), intermediate)
    h = poison(tokens, intermediate, dtype=HALF)
    if padded:
        h = torch.zeros(padded * intermediate, device=DEVICE, dtype=HALF)
    following = poison(act_mul.programs(intermediate, tokens, rank, product.device), tokens, max(rank, 1))
    lora = {"b": LoraB(LoraSum(sum_TR=low), b), "a": LoraA(a, LoraSum(following))} if rank else {}
    act_mul.act_mul(
        product, scale, squares, h, intermediate=intermediate, width=width, eps=EPS, gelu=gelu,
        padded_tokens=padded, partials_G=counts, **lora,
    )  # fmt: skip
    h = as_rows(h, tokens, intermediate, padded)
    rms = 1 / (squares.double().sum(0) / width + EPS).sqrt()
    gate, up = summed[:, : 2 * intermediate].chunk(2, 1)
    gate, up = gate * scale[0].double(), up * scale[1].double()
    if rank:
        # Who walks along columns has 1/rms in x A^T before it is rounded.
        walks = tokens > act_mul.FEW and intermediate % 64 == 0
        first = rms[:, None] if walks else torch.ones_like(rms)[:, None]
        low = (low * first).to(HALF).double() / first
        gate = gate + low[:, :rank] @ b[:intermediate].double().T
        up = up + low[:, rank:] @ b[intermediate:].double().T
    gate, up = gate * rms[:, None], up * rms[:, None]
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    assert error(h, act * up) < 3e-3
    if rank:
        assert error(low_of(following), h.double() @ a.double().T) < 1e-5


@pytest.mark.parametrize(
    "size,padded,prompt_cut,own_cut,cached,window",
    [
        (64, 0, (64, 2), (64, 2), HALF, None),
        (64, 8, (16, 2), (16, 2), HALF, 40),
        pytest.param(64, 8, (32, 2), (32, 2), FP8, None, marks=without_fp8),
        (96, 8, (16, 2), (16, 2), HALF, 100),
        (512, 8, (32, 2), (32, 2), HALF, None),
        (512, 0, (16, 2), (16, 2), HALF, 3),
        (64, 8, (64, 1), (16, 2), HALF, None),
        (64, 8, (64, 3), (16, 1), HALF, 40),
        (64, 8, (16, 4, 2), (16, 4, 2), HALF, None),
        (64, 0, (64, 1), (16, 4, 2), HALF, 40),
        pytest.param(96, 0, (64, 2), (16, 1), FP8, 100, marks=without_fp8),
    ],
)
def test_attention_shares_prompts(monkeypatch, size, padded, prompt_cut, own_cut, cached, window):
    """Two groups at their prompts and each sample at its own tokens, merged, against dense attention; with a
    window, sinks too. The last sample has ended: it has no token of its own, and with a window it sees
    nothing. What lies behind the end of a table is NaN. Where prompts are cut otherwise than own tokens, one
    program takes all of a head's items."""
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 1)
    heads, kv_heads, rank = 4, 2, 16
    prompt_cut, own_cut = attention.Cut(*prompt_cut), attention.Cut(*own_cut)
    group, members = heads // kv_heads, [[0, 3, 1], [2]]
    prompts, owns = [66, 130], [5, 64, 1, 0]
    tokens = 4
    k_cache, v_cache = (half(12, kv_heads, 64, size).to(cached) for _ in range(2))
    pages = torch.randperm(12, device=DEVICE, dtype=torch.int32)
    tables = torch.zeros(6, 3, device=DEVICE, dtype=torch.int32)
    used = 0
    for row, length in enumerate([*prompts, *owns]):
        count = -(-length // 64)
        tables[row, :count] = pages[used : used + count]
        used += count
        for cache in (k_cache, v_cache) if length % 64 else ():
            cache[int(pages[used - 1]), :, length % 64 :] = float("nan")
    items = [[0, 3, 0, 0], [3, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    order = [t for m in members for t in m]
    for t in range(tokens):
        items.append([len(order), 1, 2 + t, 1])
        order.append(t)
    of = {t: g for g, m in enumerate(members) for t in m}
    limit = torch.tensor([[prompts[of[t]] for t in range(tokens)], owns], device=DEVICE, dtype=torch.int32)
    sinks = torch.randn(heads, device=DEVICE) if window else None
    for row, length in enumerate([*prompts, *owns]) if window else ():
        # Nobody may read what no token of a table sees: pages that were given back.
        places = [prompts[of[t]] + owns[t] for t in range(tokens) if owns[t] and row in (of[t], 2 + t)]
        begins = 0 if row < 2 else prompts[of[row - 2]]
        first = max(0, min(places, default=0) - window - begins) // 64
        tables[row, : min(first, -(-length // 64))] = -(10**6)
    q = half(tokens, heads, size)
    parts = prompt_cut.splits + own_cut.splits
    out, lse = poison(parts, tokens, heads, size), poison(parts, tokens, heads)
    as_int = {"device": DEVICE, "dtype": torch.int32}
    y, a = poison(tokens, heads * size, dtype=HALF), half(rank, heads * size)
    if padded:
        y = torch.zeros(padded * heads * size, device=DEVICE, dtype=HALF)
    following = poison(heads, tokens, rank)
    work = torch.tensor(items, **as_int), torch.tensor(order, **as_int)
    # Nothing is launched between the two, so that whoever does not wait for the first is seen.
    attention.attend(
        q, k_cache, v_cache, tables, *work, limit, out, lse, prompts=prompt_cut, own=own_cut, window=window
    )
    attention.combine_splits(out, lse, y, padded_tokens=padded, sink_H=sinks, a=LoraA(a, LoraSum(following)))
    for t, own in enumerate(owns):
        used = -(-own // (64 * own_cut.least))
        unused = slice(prompt_cut.splits + used, None)
        assert own_cut.least == 1 or (lse[unused, t] == -torch.inf).all(), "few keys have few splits"
    y = as_rows(y, tokens, heads * size, padded)
    truth = torch.zeros(tokens, heads, size, dtype=torch.float64, device=DEVICE)
    for t in range(3 if window else 4):
        for h in range(heads):
            keys, values = [], []
            for row, length in ((of[t], prompts[of[t]]), (2 + t, owns[t])):
                for j in range(length):
                    position = j + (prompts[of[t]] if row > 1 else 0)
                    if window and position < prompts[of[t]] + owns[t] - window:
                        continue
                    page = int(tables[row, j // 64])
                    keys.append(k_cache[page, h // group, j % 64].double())
                    values.append(v_cache[page, h // group, j % 64].double())
            scores = torch.stack(keys) @ q[t, h].double() / math.sqrt(size)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h, None].double()])
            truth[t, h] = scores.softmax(0)[: len(keys)] @ torch.stack(values)
    drawn = slice(0, 3 if window else 4)
    assert error(y.view(tokens, heads, size)[drawn], truth[drawn]) < 5e-3
    assert error(low_of(following), y.double() @ a.double().T) < 1e-5


def test_own_tokens_beside_prompts_are_attended_as_behind_them():
    """Queries are new each time, so that whoever does not wait for them is seen."""
    tokens, group, heads, kv_heads, size = (256, 8, 28, 4, 128) if GPU else (6, 3, 4, 2, 32)
    as_int, groups = {"device": DEVICE, "dtype": torch.int32}, tokens // group
    own_T, rows = torch.randint(1, 130, (tokens,), **as_int), groups + tokens
    limit_2T = torch.stack([torch.full_like(own_T, 200), own_T])
    tables_GB = torch.randperm(4 * rows, device=DEVICE).to(torch.int32).view(rows, 4)
    caches = [half(4 * rows, kv_heads, 64, size) for _ in range(2)]
    order = torch.arange(tokens, **as_int)
    for _ in range(20 if GPU else 1):
        q, found = half(tokens, heads, size), []
        for tile in (64, 16):
            together = min(group, tile * kv_heads // heads)
            items = [
                [first, min(together, group - first % group), first // group, 0]
                for begin in range(0, tokens, group)
                for first in range(begin, begin + group, together)
            ]
            items += [[0, 0, 0, 0]] * (tokens - len(items)) + [[t, 1, groups + t, 1] for t in range(tokens)]
            out, lse = poison(2, tokens, heads, size), poison(2, tokens, heads)
            item_4 = torch.tensor(items, **as_int)
            found.append(poison(tokens, heads * size, dtype=HALF))
            attention.attend(
                q, *caches, tables_GB, item_4, order, limit_2T, out, lse, prompts=attention.Cut(tile, 1),
                own=attention.Cut(16, 1),
            )  # fmt: skip
            attention.combine_splits(out, lse, found[-1])
        assert error(*found) < (5e-3 if GPU else 1e-6)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "size,cuts", [(64, ((64, 4), (16, 1))), (96, ((16, 2), (16, 2))), (256, ((16, 1), (16, 1)))]
)
def test_parts_in_16_bits_cost_as_much_as_the_outputs_own_rounding(size, cuts, gated):
    """Attention to 200 keys of a prompt and up to 60 own ones, with splits in fp32 and as the output is kept,
    against float64; beside a sink and a gate, too."""
    kept = torch.bfloat16 if GPU else torch.float16  # to bf16 the interpreter cuts off and does not round
    tokens, heads, kv_heads = attention.HALF_PARTS, 4, 2
    as_int, keys = {"device": DEVICE, "dtype": torch.int32}, (200, 60)
    own_T = torch.randint(1, keys[1] + 1, (tokens,), **as_int)
    limit_2T = torch.stack([torch.full_like(own_T, keys[0]), own_T])
    tables_GB = torch.arange(4, **as_int).repeat(tokens + 1, 1)
    tables_GB[1:, 0] = 4 + torch.arange(tokens, **as_int)
    prompts, own = (attention.Cut(*cut) for cut in cuts)
    together = prompts.rows * kv_heads // heads
    items = [[first, together, 0, 0] for first in range(0, tokens, together)]
    items += [[0, 0, 0, 0]] * (tokens - len(items)) + [[t, 1, 1 + t, 1] for t in range(tokens)]
    q, k, v = half(tokens, heads, size), *(half(4 + tokens, kv_heads, 64, size) for _ in range(2))
    sink_H = torch.randn(heads, device=DEVICE) if gated else None
    gate_THE = torch.randn(tokens, heads, size, device=DEVICE) if gated else None

    def keys_of(cache):
        prompt = cache[:4].transpose(0, 1).flatten(1, 2)[:, : keys[0]].expand(tokens, -1, -1, -1)
        return torch.cat([prompt, cache[4:]], 2).double().repeat_interleave(heads // kv_heads, 1)

    scores = torch.einsum("the,thke->thk", q.double(), keys_of(k)) / math.sqrt(size)
    scores[:, :, keys[0] :].masked_fill_(torch.arange(64, device=DEVICE) >= own_T[:, None, None], -math.inf)
    if sink_H is not None:
        scores = torch.cat([scores, sink_H.double().expand(tokens, heads)[:, :, None]], 2)
    truth = torch.einsum("thk,thke->the", scores.softmax(2)[:, :, : keys[0] + 64], keys_of(v))
    truth = truth if gate_THE is None else truth * gate_THE.double().sigmoid()

    found = {}
    for dtype in (torch.float32, kept):
        parts = prompts.splits + own.splits
        out, lse = poison(parts, tokens, heads, size, dtype=dtype), poison(parts, tokens, heads)
        attention.attend(
            q, k, v, tables_GB, torch.tensor(items, **as_int), torch.arange(tokens, **as_int), limit_2T,
            out, lse, prompts=prompts, own=own,
        )  # fmt: skip
        y = poison(tokens, heads * size, dtype=kept)
        attention.combine_splits(out, lse, y, sink_H=sink_H, gate_THE=gate_THE)
        found[dtype] = error(y.view(tokens, heads, size), truth)
    assert found[torch.float32] < 0.4 * torch.finfo(kept).eps, found
    assert 1.05 < found[kept] / found[torch.float32] < 1.5, found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draw_token(temperature):
    tokens, vocabulary, most, width = 6, 9000, 4, 64
    logits = torch.randn(tokens, vocabulary, device=DEVICE) * 3
    logits[5, 77] = float("nan")
    squares = torch.full((1, tokens), float(width), device=DEVICE)
    as_int = {"device": DEVICE, "dtype": torch.int32}
    generated = [0, 1, 3, 0, 2, 0]
    rows = RowState(
        token_T=torch.zeros(tokens, **as_int), position_T=torch.full((tokens,), 9, **as_int),
        limit_2T=torch.full((2, tokens), 64, **as_int),
        generated_T=torch.tensor(generated, **as_int), max_new_T=torch.full((tokens,), most, **as_int),
        done_T=torch.tensor([0, 0, 0, 1, 0, 0], **as_int), uniform_TM=torch.rand(tokens, most, device=DEVICE),
        out_token_TM=torch.full((tokens, most), -7, **as_int), out_stats_2TM=poison(2, tokens, most),
    )  # fmt: skip
    log_probs = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    expected = log_probs.nan_to_num().topk(tokens).indices.diagonal().tolist()  # no two rows draw the same
    if temperature == 0:
        expected = log_probs.argmax(-1).tolist()
    for t in range(tokens):  # a uniform in the middle of what the token owns, where rounding decides nothing
        n = min(generated[t], most - 1)
        probs = log_probs[t].exp()
        rows.uniform_TM[t, n] = probs[: expected[t]].sum() + probs[expected[t]] / 2
    settings = RowSettings.free(tokens, DEVICE)
    params = SamplingParams(most, temperature, stop_token_ids=(expected[1],))
    write_settings(settings, torch.arange(tokens, device=DEVICE), [params] * tokens)
    draw_token(
        logits, squares, torch.empty(3, tokens, 3, device=DEVICE), rows, settings, width=width, eps=0.0,
    )  # fmt: skip
    assert rows.done_T.tolist() == [0, 1, 2, 1, 0, 3]
    for t in (0, 1, 2, 4):
        n = generated[t]
        token = int(rows.out_token_TM[t, n])
        assert token == expected[t]
        assert abs(float(rows.out_stats_2TM[0, t, n]) - float(log_probs[t, token])) < 1e-4
        entropy = -(log_probs[t].exp() * log_probs[t]).sum()
        assert abs(float(rows.out_stats_2TM[1, t, n]) - float(entropy)) < 1e-3
        assert int(rows.generated_T[t]) == n + 1
    assert (rows.out_token_TM[3] == -7).all()
    assert (rows.out_token_TM[5] == -7).all()
    assert rows.limit_2T[1].tolist() == [65, 0, 0, 64, 65, 0]
    assert rows.position_T.tolist()[:2] == [10, 9]


def test_a_tensor_that_is_not_contiguous_is_named():
    w = torch.ones(256, device=DEVICE)[::2]
    found, u, squares = torch.zeros(3, 128, device=DEVICE), half(3, 128), poison(2, 3)
    with pytest.raises(
        QeRLError, match=r"residual_norm was given w_D of the shape \(128,\) whose dimension 0"
    ):
        residual_norm.residual_norm(found, w, u, squares, gemm_STN=torch.zeros(1, 3, 128, device=DEVICE))
