"""Attention over the paged KV cache, in which samples of one prompt read its keys and values once.

A work item is a run of query tokens that attend to one block table: the samples of a group to their prompt's
blocks, one sample to its own blocks, or a slice of a prompt to itself during prefill. All query heads that
share a kv head are rows of the same tile, so a block of keys is read from memory once for all of them. Each
token has its own limit on the keys that it sees, which makes decode, shared prompts and causal prefill the
same loop.

With few tokens and short prompts, tiles have 16 rows, for prompts as for own tokens. A group that needs
several tiles (8 samples with 7 query heads per kv head: four) reads its prompt from the L2 cache after the
first. With many tokens or long prompts such reads take more time than those of memory, so a prompt's tile may
have 64 rows, with warpgroup products. Own tokens in the same launch would get as many registers, with which
two programs fit on a multiprocessor instead of five, so prompts have a separate launch before. The second
launch does not wait for the first: it starts where prompts leave room, and ends when they have ended.
`qerl.rollout.paged.decode` decides where that pays.

Each work item's keys are divided into splits that run in parallel; every split leaves a normalised output and
its log-sum-exp, and a second kernel combines them, multiplies by the output's gate where a layer has one, and
computes x A^T for the output projection on the way.

Heads are padded with zeros to a power of two. Heads wider than 256 are read half a page at a time, for which
shared memory has room. In a layer with a window a tile begins at the first key that any of its tokens sees;
the pages before that may belong to other sequences by now.

Shapes: T tokens, H query heads, E head size, C = H E, G block tables, B blocks of a table, Z splits (those at
shared prompts, then those at a sequence's own tokens), 2 those two kinds.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qerl.kernels.cards import card_of
from qerl.kernels.decode.common import (
    apply_a,
    begin,
    begin_beside,
    begin_late,
    both,
    in_head,
    load_a,
    load_operand,
    store_operand,
)
from qerl.kernels.decode.launch import NO_A, LoraA
from qerl.kernels.device import multiprocessors
from qerl.kernels.launch import dependent, pointers, shared_bytes
from qerl.kernels.limits import WHOLE_PARTS, rank_part

ALONE, AHEAD, BESIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of a launch: the only one, that of prompts, or that of own tokens beside it."""

HALF_PARTS = 64
"""Tokens of a pass from which on the outputs of splits are kept in 16 bits, see `parts_dtype`."""

_LOG2_E = tl.constexpr(1.4426950408889634)


def prefill_rows(grouped_heads: int, size: int) -> int:
    """Return the rows of a tile, (token, query head) pairs that share a kv head, for slices of a prompt: half
    as many for heads so wide that the tile's output takes half of all registers."""
    return max(64 if size <= 256 else 32, triton.next_power_of_2(grouped_heads))


def decode_rows(grouped_heads: int) -> int:
    """Return the rows of a tile while decoding, where most items are one token.

    Compiled for sm_90 by Triton 3.6, heads of 128: a program with 16 rows takes 96 registers per thread and
    38 KB of shared memory with half a page at a time, so five fit on a multiprocessor, and 158 and 72 KB with
    a whole one, so three; with 64 rows it takes 214 and 66 KB, and two fit.
    """
    return max(16, triton.next_power_of_2(grouped_heads))


def prompt_rows(grouped_heads: int, size: int, device: torch.device) -> int:
    """Return the rows of a tile while decoding, for samples of a group at their prompt in a separate launch;
    as `decode_rows` where the card has no products of warpgroups, or heads are too wide.

    Args:
        grouped_heads: Query heads per kv head.
        size: Head size. Above 128, two programs do not fit on a multiprocessor, nor own tokens beside one.
        device: Device that runs the kernel.
    """
    if size > 128 or card_of(device).math != "wgmma":
        return decode_rows(grouped_heads)
    return max(64, triton.next_power_of_2(grouped_heads))


def parts_dtype(tokens: int, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the outputs of splits until they are combined.

    With many tokens writing and reading them takes time: whole steps of 64 to 256 rows are 0.6 to 1.0 %
    faster with half of the bytes (ways-7b-attend-halves-h200.json). Fewer rows were not timed and keep fp32;
    passes of prefill were not timed either and follow the same rule.

    bf16 rounds each number by at most 2^-9 of itself, as the combined output is rounded too. Splits are
    summed in fp32 with weights that sum to at most one, so where they do not cancel the output's error grows
    by the square root of two at most. A token with one split, as most have in prefill, loses nothing: its
    output is rounded once, or a second time after a sink or a gate.

    Args:
        tokens: Tokens of the pass.
        dtype: Dtype of the model.
    """
    return dtype if tokens >= HALF_PARTS else torch.float32


@triton.jit
def attend_item(
    item, q_THE, k_cache, v_cache, tables_GB, item_4, order, limit_2T, out_ZTHE, lse_ZTH,
    T, table_width, scale, window,
    HQ: tl.constexpr, HKV: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    PROMPT_SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, LAUNCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One split of a work item, of the query heads that share a kv head."""
    GROUP: tl.constexpr = HQ // HKV
    kv_head, split = tl.program_id(1), tl.program_id(2)
    start = tl.load(item_4 + item * 4)
    count = tl.load(item_4 + item * 4 + 1)
    if count > 0:
        table = tl.load(item_4 + item * 4 + 2)
        own = tl.load(item_4 + item * 4 + 3)
        row = tl.arange(0, ROWS)
        in_row = row < count * GROUP
        t = tl.load(order + start + row // GROUP, mask=in_row, other=0)
        head = kv_head * GROUP + row % GROUP
        limit = tl.load(limit_2T + own * T + t, mask=in_row, other=0)
        if WINDOW:
            # The token lies behind all of its prompt that it sees and is the last of its own. One that has
            # ended sees nothing: its place is not known, and pages may be gone.
            hidden = limit - window
            if own == 0:
                drawn = tl.load(limit_2T + T + t, mask=in_row, other=0)
                limit = tl.where(drawn > 0, limit, 0)
                hidden += drawn
            hidden = tl.maximum(hidden, 0)
        last = tl.max(limit, axis=0)
        blocks = tl.cdiv(last, KEYS)
        first = 0
        if WINDOW:
            first = tl.minimum(tl.min(tl.where(limit > 0, hidden, blocks * KEYS), axis=0) // KEYS, blocks)
        each = tl.maximum(tl.cdiv(blocks - first, SPLITS), LEAST)
        e = tl.arange(0, E_PADDED)
        in_e = in_head(e, E)
        offset = tl.arange(0, KEYS)
        if LAUNCH == ALONE:
            begin(PDL)
        elif LAUNCH == AHEAD:
            begin_late(PDL)
        else:
            begin_beside(PDL)
        inside = both(in_row[:, None], in_e)
        q = tl.load(q_THE + (t[:, None] * HQ + head[:, None]) * E + e[None, :], mask=inside, other=0.0)
        if k_cache.dtype.element_ty == tl.float8e4nv:
            # Two numbers of E4M3 become FP16 in one instruction, and from there BF16 in two slow ones.
            q = q.to(tl.float16)
        scale *= _LOG2_E
        best = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, E_PADDED), tl.float32)
        for block in range(first + split * each, tl.minimum(first + split * each + each, blocks)):
            place = block * KEYS + offset
            page = tl.load(tables_GB + table * table_width + block // (PAGE // KEYS)).to(tl.int64)
            at = (page * HKV + kv_head) * PAGE + block % (PAGE // KEYS) * KEYS
            at = (at + offset)[:, None] * E + e[None, :]
            # What a page holds beyond a sequence's end was there before: it is not read, and zero weight
            # does not meet NaN.
            held = both((place < last)[:, None], in_e)
            visible = place[None, :] < limit[:, None]
            if WINDOW:
                visible = visible & (place[None, :] >= hidden[:, None])
            k = tl.load(k_cache + at, mask=held, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), out_dtype=tl.float32) * scale
            scores = tl.where(visible, scores, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            # A row that sees nothing yet keeps -inf; its exponent must not become inf - inf.
            shift = tl.where(new_best == -float("inf"), 0.0, new_best)
            p = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(best - shift)
            total = total * fade + tl.sum(p, axis=1)
            v = tl.load(v_cache + at, mask=held, other=0.0).to(q.dtype)
            acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None], out_dtype=tl.float32)
            best = new_best
        z = own * PROMPT_SPLITS + split
        filled = total > 0
        acc = acc / tl.where(filled, total, 1.0)[:, None]
        lse = (best + tl.log2(tl.where(filled, total, 1.0))) / _LOG2_E
        lse = tl.where(filled, lse, -float("inf"))
        at = (z * T + t) * HQ + head
        tl.store(lse_ZTH + at, lse, mask=in_row)
        # A split without keys has no weight, so its output is not stored.
        tl.store(out_ZTHE + at[:, None].to(tl.int64) * E + e[None, :], acc, mask=inside & filled[:, None])


@triton.jit
def _attend(
    q_THE, k_cache, v_cache, tables_GB, item_4, order, limit_2T, out_ZTHE, lse_ZTH,
    T, items, table_width, scale, window,
    HQ: tl.constexpr, HKV: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    PROMPT_SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, LAUNCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if LAUNCH == AHEAD:
        # Most of the places for items are empty, and a program for each would be in the way.
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            attend_item(
                item, q_THE, k_cache, v_cache, tables_GB, item_4, order, limit_2T, out_ZTHE, lse_ZTH,
                T, table_width, scale, window, HQ, HKV, E, E_PADDED, PAGE, KEYS, ROWS, SPLITS, PROMPT_SPLITS,
                LEAST, WINDOW, LAUNCH, PDL,
            )  # fmt: skip
        begin_late(PDL)
    else:
        attend_item(
            tl.program_id(0), q_THE, k_cache, v_cache, tables_GB, item_4, order, limit_2T, out_ZTHE, lse_ZTH,
            T, table_width, scale, window, HQ, HKV, E, E_PADDED, PAGE, KEYS, ROWS, SPLITS, PROMPT_SPLITS,
            LEAST, WINDOW, LAUNCH, PDL,
        )  # fmt: skip
        # Beside prompts one program waits for them, and with it what comes next; the others make room.
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
        if LAUNCH == ALONE or first:
            begin(PDL)


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
        part = part.to(tl.float32)
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
"""Maximum tokens for which a program combines the splits of one token and head. A program of 16 tokens loads
splits one after another, because its registers do not hold all of them, and also computes the padding up to
16 tokens."""


class Cut(NamedTuple):
    """Tile rows and splits of one kind of work items.

    Attributes:
        rows: Rows of a tile, a power of two from 16 on and at least the query heads per kv head.
        splits: Parallel splits of an item's keys.
        least: Minimum pages of a split; an item with few keys then uses only its first splits.
    """

    rows: int
    splits: int
    least: int = 1


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
    prompts: Cut,
    own: Cut,
    scale: float | None = None,
    window: int | None = None,
) -> None:
    """Write the partial attention of every work item.

    Args:
        q_THE: Queries, bf16 [T, query heads, head size].
        k_cache, v_cache: [blocks, kv heads, block tokens, head size].
        tables_GB: int32 block tables.
        item_4: int32 [items, 4]: first index into ``order``, tokens (0: nothing to do; at most the rows of a
            tile / query heads per kv head), row of ``tables_GB``, and which of the two limits and kinds of
            splits the work item uses (0 for a shared prompt, 1 for a sequence's own tokens). If ``prompts``
            and ``own`` differ, the first half are the items at shared prompts.
        order: int32, the tokens of the work items.
        limit_2T: int32 [2, T]: how many cached tokens of the work item's table a token sees.
        out_ZTHE: fp32 or bf16 (`parts_dtype`) [splits of both kinds, T, heads, head size], written where a
            work item covers the token, which sees keys of the split.
        lse_ZTH: fp32 [splits of both kinds, T, heads], likewise; the caller fills uncovered ones with -inf.
        prompts, own: Rows and splits of the two kinds of items.
        scale: Factor of the scores; None for head size ** -0.5.
        window: Tokens that a token sees, itself included; None for all that the limits let it see. Blocks
            before the window are not read.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    tokens, heads, size = q_THE.shape
    kv_heads, page = k_cache.shape[1:3]
    padded, items = triton.next_power_of_2(size), item_4.shape[0]
    many = tokens * kv_heads * own.splits > WHOLE_PAGES * multiprocessors(q_THE.device)

    def launch(which: tl.constexpr, item_4: torch.Tensor, programs: int, cut: Cut) -> None:
        arguments = pointers(
            "attend", q_THE, q_THE=q_THE, k_cache=k_cache, v_cache=v_cache, tables_GB=tables_GB,
            item_4=item_4, order=order, limit_2T=limit_2T, out_ZTHE=out_ZTHE, lse_ZTH=lse_ZTH,
        )  # fmt: skip
        loads = _pipeline(which, many, cut.rows, padded, page, shared_bytes(q_THE))
        _attend[(programs, kv_heads, cut.splits)](
            *arguments, tokens, item_4.shape[0], tables_GB.shape[1],
            size**-0.5 if scale is None else scale, window or 0,
            HQ=heads, HKV=kv_heads, E=size, E_PADDED=padded, PAGE=page,
            ROWS=cut.rows, SPLITS=cut.splits, PROMPT_SPLITS=prompts.splits,
            LEAST=1 if cut.least == 1 else cut.least * page // loads["KEYS"], WINDOW=window is not None,
            LAUNCH=which.value, **loads, **dependent(q_THE),
        )  # fmt: skip

    if prompts == own:
        launch(ALONE, item_4, items, own)
        return
    filling = 2 * multiprocessors(q_THE.device) // (kv_heads * prompts.splits)
    launch(AHEAD, item_4[: items // 2], max(1, min(items // 2, filling)), prompts)
    launch(BESIDE, item_4[items // 2 :], items // 2, own)


WHOLE_PAGES = 3
"""Programs of 16 rows that fit on a multiprocessor if each loads a whole page at a time, see
`decode_rows`. With 64 batch rows that each have their own prompt, and eight kv heads, a quarter would wait
for the others: steps of Llama 3 8B after prompts of 4096 tokens are 7.8 % faster with half pages there, and
differ by at most 0.6 % where programs are fewer or prompts are shared (ways-llama3-8b-own-prompts-h200.json,
ways-llama3-8b-h200.json)."""


def _pipeline(
    launch: tl.constexpr, many: bool, rows: int, size: int, page: int, shared: int
) -> dict[str, int]:
    """Return the keys of a block, the warps of a program, and the stages in which it loads blocks ahead.

    The place of a block is read from a table, which takes as many stages as the block itself: with two, three
    or four stages Triton makes one block in shared memory, and a program computes nothing while it waits for
    the next one; with five it makes two. Five are used for heads of up to 128, with half a page where
    programs are many, so that five of 16 rows fit on a multiprocessor.

    Many rows of heads wider than 128 take eight warps, whose registers hold the output. Loading pages ahead
    would need 104 KB of shared memory; a card with less loads each page where it is used.

    Args:
        launch: Kind of the launch.
        many: Whether more programs have keys of their own tokens than fit with whole pages.
        rows: Rows of a tile.
        size: Head size, padded.
        page: Tokens of a page.
        shared: Bytes of shared memory that a program may use.
    """
    if size > 256:
        return {"KEYS": page // 2, "num_warps": 8, "num_stages": 2 if shared >= WHOLE_PARTS else 1}
    if size > 128 and rows > 16:
        return {"KEYS": page, "num_warps": 8, "num_stages": 3 if shared >= WHOLE_PARTS else 1}
    one_of_two = launch.value != ALONE.value
    if not one_of_two and (size > 128 or rows > 32 or shared < WHOLE_PARTS):
        return {"KEYS": page, "num_warps": 4, "num_stages": 3}
    return {"KEYS": page // 2 if one_of_two or many else page, "num_warps": 4, "num_stages": 5}


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
