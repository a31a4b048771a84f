"""Attention over the paged KV cache, in which samples of one prompt read its keys and values once.

A work item is a run of query tokens that look at one block table: the samples of a group at their prompt's
blocks, one sample at its own blocks, or a slice of a prompt at itself during prefill.
All query heads that share a kv head are rows of the same tile, so a block of keys is read from memory once
for all of them. A group that needs several tiles (8 samples with 7 query heads per kv head: four of 16 rows)
reads it from the L2 cache after that. How far a row may look is a number for each token, which makes decode,
shared prompts and causal prefill the same loop.

Each work item's keys are divided into splits that run in parallel; every split leaves a normalised output and
its log-sum-exp, and a second kernel combines them, multiplies by the output's gate where a layer has one, and
computes x A^T for the output projection on the way.

A head whose size is no power of two is computed as one of the next: what it lacks is zero. Heads wider than
256 are read half a page at a time, for which shared memory has room. In a layer with a window a tile begins
at the first key that any of its tokens sees; the pages before that may be anybody's.

Shapes: T tokens, H query heads, E head size, C = H E, G block tables, B blocks of a table, Z twice the splits
(those at shared prompts, then those at a sequence's own tokens), 2 those two kinds.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import (
    apply_a,
    begin,
    both,
    in_head,
    load_a,
    load_head,
    load_operand,
    store_operand,
)
from qerl.kernels.decode.launch import NO_A, LoraA
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import WHOLE_PARTS, rank_part


def prefill_rows(grouped_heads: int, size: int) -> int:
    """Rows of a tile, (token, query head) pairs that share a kv head, where items are slices of a prompt:
    half as many where heads are so wide that the tile's output takes half of all registers."""
    return max(64 if size <= 256 else 32, triton.next_power_of_2(grouped_heads))


def decode_rows(grouped_heads: int) -> int:
    """Rows of a tile while decoding, where most items are one token.

    Compiled for sm_90, heads of 128: a program with 16 rows takes 94 registers per thread and 39 KB of
    shared memory, so five fit on a multiprocessor; with 32 rows it takes 194 and 45 KB, with 64 rows 235 and
    82 KB, and two fit in either case.
    """
    return max(16, triton.next_power_of_2(grouped_heads))


@triton.jit
def _attend(
    q_THE, k_cache, v_cache, tables_GB, item_4, order, limit_2T, out_ZTHE, lse_ZTH,
    T, table_width, scale, window,
    HQ: tl.constexpr, HKV: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HQ // HKV
    item, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(item_4 + item * 4)
    count = tl.load(item_4 + item * 4 + 1)
    if count == 0:
        begin(PDL)
        return
    table = tl.load(item_4 + item * 4 + 2)
    own = tl.load(item_4 + item * 4 + 3)
    row = tl.arange(0, ROWS)
    in_row = row < count * GROUP
    t = tl.load(order + start + row // GROUP, mask=in_row, other=0)
    head = kv_head * GROUP + row % GROUP
    limit = tl.load(limit_2T + own * T + t, mask=in_row, other=0)
    if WINDOW:
        # The token lies behind all of its prompt that it sees and is the last of its own. One that has ended
        # sees nothing: its place is not known, and pages may be gone.
        hidden = limit - window
        if own == 0:
            drawn = tl.load(limit_2T + T + t, mask=in_row, other=0)
            limit = tl.where(drawn > 0, limit, 0)
            hidden += drawn
        hidden = tl.maximum(hidden, 0)
    blocks = tl.cdiv(tl.max(limit, axis=0), KEYS)
    first = 0
    if WINDOW:
        first = tl.minimum(tl.min(tl.where(limit > 0, hidden, blocks * KEYS), axis=0) // KEYS, blocks)
    each = tl.cdiv(blocks - first, SPLITS)
    e = tl.arange(0, E_PADDED)
    in_e = in_head(e, E)
    offset = tl.arange(0, KEYS)
    begin(PDL)
    inside = both(in_row[:, None], in_e)
    q = tl.load(q_THE + (t[:, None] * HQ + head[:, None]) * E + e[None, :], mask=inside, other=0.0)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, E_PADDED), tl.float32)
    for block in range(first + split * each, tl.minimum(first + split * each + each, blocks)):
        place = block * KEYS + offset
        page = tl.load(tables_GB + table * table_width + block // (PAGE // KEYS)).to(tl.int64)
        at = (page * HKV + kv_head) * PAGE + block % (PAGE // KEYS) * KEYS
        at = (at + offset)[:, None] * E + e[None, :]
        visible = place[None, :] < limit[:, None]
        if WINDOW:
            visible = visible & (place[None, :] >= hidden[:, None])
        k = load_head(k_cache + at, in_e).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), out_dtype=tl.float32) * scale
        scores = tl.where(visible, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A row that sees nothing yet keeps -inf; its exponent must not become inf - inf.
        shift = tl.where(new_best == -float("inf"), 0.0, new_best)
        p = tl.exp(scores - shift[:, None])
        fade = tl.exp(best - shift)
        total = total * fade + tl.sum(p, axis=1)
        # A page beyond a sequence's end holds whatever was there before: zero weight must not meet NaN.
        seen = place < tl.max(limit, axis=0)
        v = tl.load(v_cache + at, mask=both(seen[:, None], in_e), other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None], out_dtype=tl.float32)
        best = new_best
    z = own * SPLITS + split
    filled = total > 0
    acc = acc / tl.where(filled, total, 1.0)[:, None]
    lse = tl.where(filled, best + tl.log(tl.where(filled, total, 1.0)), -float("inf"))
    at = (z * T + t) * HQ + head
    tl.store(lse_ZTH + at, lse, mask=in_row)
    tl.store(out_ZTHE + at[:, None].to(tl.int64) * E + e[None, :], acc, mask=inside)


@triton.jit
def _combine_splits(
    out_ZTHE, lse_ZTH, sink_H, gate_THE, a_RK, y_TC, parts_PTR, T,
    HQ: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, Z: tl.constexpr,
    SINKS: tl.constexpr, GATED: tl.constexpr, A_RANKS: tl.constexpr, A_PART: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = t < T
    e = tl.arange(0, E_PADDED)
    in_e = in_head(e, E)
    c = head * E + e
    if A_RANKS > 0:
        a = load_a(a_RK, 0, c, e < E, HQ * E, A_RANKS, A_PART)
    begin(PDL)
    best = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    y = tl.zeros((BLOCK_T, E_PADDED), tl.float32)
    # No load waits for another one: what a split without keys has left is loaded as well, and weighs nothing.
    for z in tl.static_range(Z):
        at = (z * T + t) * HQ + head
        lse = tl.load(lse_ZTH + at, mask=in_t, other=-float("inf"))
        inside = both(in_t[:, None], in_e)
        part = tl.load(out_ZTHE + at[:, None].to(tl.int64) * E + e[None, :], mask=inside, other=0.0)
        new_best = tl.maximum(best, lse)
        shift = tl.where(new_best == -float("inf"), 0.0, new_best)
        fade, weight = tl.exp(best - shift), tl.exp(lse - shift)
        total = total * fade + weight
        y = y * fade[:, None] + tl.where((weight > 0)[:, None], part * weight[:, None], 0.0)
        best = new_best
    if SINKS:
        total += tl.exp(tl.load(sink_H + head) - best)
    inside = both(in_t[:, None], in_e)
    y = y / total[:, None]
    if GATED:
        gate_at = gate_THE + t[:, None].to(tl.int64) * (HQ * E) + c[None, :]
        y *= tl.sigmoid(tl.load(gate_at, mask=inside, other=0.0))
    store_operand(y_TC, y, t, c, inside, HQ * E, PADDED)
    if A_RANKS > 0:
        # Read back rather than kept: Triton would convert every split above to the product's layout (7 us
        # instead of 3).
        tl.debug_barrier()
        y = load_operand(y_TC, t, c, inside, HQ * E, PADDED)
        apply_a(parts_PTR, head, y, a, a_RK, c, e < E, HQ * E, t, in_t, T, A_RANKS, A_PART)


@triton.jit
def _combine_of_token(
    out_ZTHE, lse_ZTH, sink_H, gate_THE, a_RK, y_TC, parts_PTR, T,
    HQ: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, Z: tl.constexpr, Z_PADDED: tl.constexpr,
    SINKS: tl.constexpr, GATED: tl.constexpr, A_RANKS: tl.constexpr, A_PART: tl.constexpr,
    PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token: all of its splits are loaded at once, and x A^T needs no product of tiles."""
    head = tl.program_id(0)
    t = tl.program_id(1) + tl.arange(0, 1)
    z = tl.arange(0, Z_PADDED)
    in_z = z < Z
    e = tl.arange(0, E_PADDED)
    in_e = e < E
    c = head * E + e
    if A_RANKS > 0:
        a = load_a(a_RK, 0, c, in_e, HQ * E, A_RANKS, A_PART)
    begin(PDL)
    at = (z * T + tl.program_id(1)) * HQ + head
    lse = tl.load(lse_ZTH + at, mask=in_z, other=-float("inf"))
    inside = both(in_z[:, None], in_head(e, E))
    part = tl.load(out_ZTHE + at[:, None].to(tl.int64) * E + e[None, :], mask=inside, other=0.0)
    best = tl.max(lse, axis=0)
    weight = tl.exp(lse - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(weight, axis=0)
    y = tl.sum(tl.where((weight > 0)[:, None], part * weight[:, None], 0.0), axis=0)
    if SINKS:
        total += tl.exp(tl.load(sink_H + head) - best)
    y = y / total
    if GATED:
        y *= tl.sigmoid(tl.load(gate_THE + tl.program_id(1) * (HQ * E) + c, mask=in_e, other=0.0))
    y = y.to(y_TC.dtype.element_ty)
    store_operand(y_TC, y[None, :], t, c, in_e[None, :], HQ * E, PADDED)
    if A_RANKS > 0:
        to = parts_PTR + (head * T + tl.program_id(1)) * A_RANKS
        for first in tl.static_range(0, A_RANKS, A_PART):
            if first > 0:
                a = load_a(a_RK, first, c, in_e, HQ * E, A_RANKS, A_PART)
            r = first + tl.arange(0, A_PART)
            tl.store(to + r, tl.sum(a.to(tl.float32) * y.to(tl.float32)[None, :], axis=1), mask=r < A_RANKS)


FEW_TOKENS = 8
"""Tokens up to which a program combines the splits of one token and head. One of 16 tokens loads splits one
after another, because its registers do not hold all of them, and computes what it lacks of 16 as well."""


def attend(
    q_THE: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables_GB: torch.Tensor,
    item_4: torch.Tensor,
    order: torch.Tensor,
    limit_2T: torch.Tensor,
    out_ZTHE: torch.Tensor,
    lse_ZTH: torch.Tensor,
    *,
    splits: int,
    rows: int,
    scale: float | None = None,
    window: int | None = None,
) -> None:
    """Write the partial attention of every work item.

    Args:
        q_THE: Queries, bf16 [T, query heads, head size].
        k_cache, v_cache: [blocks, kv heads, block tokens, head size].
        tables_GB: int32 block tables.
        item_4: int32 [items, 4]: first index into ``order``, tokens (0: nothing to do; at most ``rows`` /
            query heads per kv head), row of ``tables_GB``, and which of the two limits and halves of the
            output the work item uses (0 for a shared prompt, 1 for a sequence's own tokens).
        order: int32, the tokens of the work items.
        limit_2T: int32 [2, T]: how many cached tokens of the work item's table a token sees.
        out_ZTHE: fp32 [2 * splits, T, heads, head size], written where a work item covers the token.
        lse_ZTH: fp32 [2 * splits, T, heads], likewise; the caller fills uncovered halves with -inf.
        splits: Number of parallel splits of a work item's keys.
        rows: Rows of a tile, a power of two from 16 on and at least the query heads per kv head.
        scale: Factor of the scores; None for head size ** -0.5.
        window: Tokens that a token sees, itself included; None for all that the limits let it see. What
            blocks behind it hold is not read.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, heads, size = q_THE.shape
    kv_heads, page = k_cache.shape[1:3]
    padded = triton.next_power_of_2(size)
    arguments = pointers(
        "attend", q_THE, q_THE=q_THE, k_cache=k_cache, v_cache=v_cache, tables_GB=tables_GB, item_4=item_4,
        order=order, limit_2T=limit_2T, out_ZTHE=out_ZTHE, lse_ZTH=lse_ZTH,
    )  # fmt: skip
    _attend[(item_4.shape[0], kv_heads, splits)](
        *arguments, tokens, tables_GB.shape[1], size**-0.5 if scale is None else scale, window or 0,
        HQ=heads, HKV=kv_heads, E=size, E_PADDED=padded, PAGE=page,
        KEYS=page if padded <= 256 else page // 2, ROWS=rows, SPLITS=splits,
        WINDOW=window is not None, **_pipeline(rows, padded, shared_bytes(q_THE)), **dependent(q_THE),
    )  # fmt: skip


def _pipeline(rows: int, size: int, shared: int) -> dict[str, int]:
    """Warps of a program, and stages in which it asks for pages of keys and values ahead of their use.

    Many rows of heads wider than 128 take eight warps, whose registers hold the output. Pages ahead would
    need 104 KB of shared memory; a card with less loads each where it is used.
    """
    if size > 256:
        return {"num_warps": 8, "num_stages": 2 if shared >= WHOLE_PARTS else 1}
    if size <= 128 or rows <= 16:
        return {"num_warps": 4, "num_stages": 3}
    return {"num_warps": 8, "num_stages": 3 if shared >= WHOLE_PARTS else 1}


def combine_splits(
    out_ZTHE: torch.Tensor,
    lse_ZTH: torch.Tensor,
    y_TC: torch.Tensor,
    *,
    padded_tokens: int = 0,
    sink_H: torch.Tensor | None = None,
    gate_THE: torch.Tensor | None = None,
    a: LoraA = NO_A,
) -> None:
    """Write the attention's output y, bf16, as the output projection reads it.

    Args:
        out_ZTHE, lse_ZTH: As :func:`attend` left them.
        y_TC: Written, [T, C] or in the order of ``packed_gemm``.
        padded_tokens: Tokens that ``y_TC`` has room for in the order of ``packed_gemm``; 0 for [T, C].
        sink_H: fp32, a logit per head that takes part in the softmax and has no value.
        gate_THE: fp32, as `rope_kv` left it: the output is multiplied by its sigmoid.
        a: LoRA of the output projection.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    splits, tokens, heads, size = out_ZTHE.shape
    arguments = pointers(
        "combine_splits", y_TC, out_ZTHE=out_ZTHE, lse_ZTH=lse_ZTH, sink_H=sink_H, gate_THE=gate_THE,
        a_RK=a.a_RK, y_TC=y_TC, parts_PTR=a.xa.parts_PTR,
    )  # fmt: skip
    constants = {
        "HQ": heads, "E": size, "E_PADDED": triton.next_power_of_2(size), "Z": splits,
        "SINKS": sink_H is not None, "GATED": gate_THE is not None,
        **a.constants(rank_part(a.ranks, shared_bytes(out_ZTHE))),
        "PADDED": padded_tokens, "num_warps": 4, **dependent(out_ZTHE),
    }  # fmt: skip
    if tokens <= FEW_TOKENS:
        _combine_of_token[(heads, tokens)](
            *arguments, tokens, **constants, Z_PADDED=triton.next_power_of_2(splits)
        )
    else:
        block_t = 16
        _combine_splits[(heads, triton.cdiv(tokens, block_t))](
            *arguments, tokens, **constants, BLOCK_T=block_t
        )
