"""Several positions of a row in one decode step: drafts before it, and what is accepted behind it.

Every row has L lanes, tokens of the step that lie behind each other: the row's last token and up to L - 1
drafted ones. What a draft is, and why accepted tokens are those that would have been drawn one by one, is
said in `qerl.rollout.drafts`. Here the text that is searched is a corpus that the host wrote, with the row's
prompt at its end, and what the row has generated behind it.

The step writes the keys and values of all lanes before any of them attends, and each sees the cache up to its
own place. No kernel asks in which lane a token lies, so a lane has the bits of the first lane of a step with
as many tokens; steps of other sizes cut sums differently. Keys of drafts that are not accepted are
overwritten by the next step.

Shapes: R rows, L lanes, T = R L tokens of the step, C tokens of a corpus, M tokens that a row may generate.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from qerl.kernels.decode.common import begin
from qerl.kernels.decode.draw import RowState
from qerl.kernels.launch import dependent, pointers

LONGEST_MATCH = 4
"""Tokens that are compared at most."""

_BLOCK = 1024
_MOST = 1 << 26
"""More than the tokens of any text; a score is the tokens that agree times this, and where they end."""


@dataclass
class LaneState:
    """Lanes of all rows, and what drafts are looked for in.

    Attributes:
        tokens: What the kernel that draws reads and writes of each lane, as if it were a row that generates
            one token.
        draft_T: int32, the token that a lane was given.
        drafts_R: int32, lanes behind the first that hold a draft.
        corpus_RC: int32, what is searched beside the row's own tokens; -1 agrees with nothing.
        known_R: int32, tokens of each corpus.
        counts_2: int32, tokens drafted and accepted so far.
    """

    tokens: RowState
    draft_T: torch.Tensor
    drafts_R: torch.Tensor
    corpus_RC: torch.Tensor
    known_R: torch.Tensor
    counts_2: torch.Tensor


@triton.jit
def text_at(corpus_C, out_M, i, known, mask):
    """Tokens of a row's text: its corpus, then what it has generated."""
    of_corpus = tl.load(corpus_C + i, mask=mask & (i < known), other=-1)
    own = tl.load(out_M + i - known, mask=mask & (i >= known), other=-1)
    return tl.where(i < known, of_corpus, own)


@triton.jit
def _propose(
    token_T, position_T, limit_2T, generated_T, max_new_T, done_T, uniform_TM, out_token_TM,
    lane_token_T, lane_position_T, lane_limit_2T, lane_generated_T, lane_done_T, lane_uniform_T,
    draft_T, drafts_R, corpus_RC, known_R,
    R, M, C,
    LANES: tl.constexpr, LANES_PADDED: tl.constexpr, MATCH: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    begin(PDL)
    n, known, running = tl.load(generated_T + r), tl.load(known_R + r), tl.load(done_T + r) == 0
    corpus, out = corpus_RC + r * C, out_token_TM + r * M
    total = known + n
    best = 0
    for start in range(1, total, BLOCK):
        end = start + tl.arange(0, BLOCK)
        agree = end < total
        score = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(1, MATCH + 1):
            there = text_at(corpus, out, end - back, known, agree & (end >= back))
            here = text_at(corpus, out, total - back, known, total >= back)
            agree = agree & (there == here) & (there >= 0)
            score += agree.to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(score > 0, score * MOST + end, 0), axis=0))
    end = best % MOST
    count = tl.minimum(tl.minimum(total - end, LANES - 1), tl.load(max_new_T + r) - n - 1)
    count = tl.where((best > 0) & running, count, 0)
    tl.store(drafts_R + r, count)

    j = tl.arange(0, LANES_PADDED)
    lane, is_lane = r * LANES + j, j < LANES
    used = j <= tl.where(running, count, -1)
    drafted = text_at(corpus, out, end + j - 1, known, used & (j > 0))
    token = tl.where(used & (j > 0), drafted, tl.load(token_T + r))
    at = n + tl.where(used, j, 0)
    tl.store(draft_T + lane, token, mask=is_lane)
    # A separator is drafted where a sibling's completion ends; it is no token, and nothing agrees with it.
    tl.store(lane_token_T + lane, tl.maximum(token, 0), mask=is_lane)
    tl.store(lane_position_T + lane, tl.load(position_T + r) + at - n, mask=is_lane)
    tl.store(lane_limit_2T + lane, tl.load(limit_2T + r), mask=is_lane)
    own = tl.where(used, tl.load(limit_2T + R + r) + at - n, 0)
    tl.store(lane_limit_2T + R * LANES + lane, own, mask=is_lane)
    tl.store(lane_generated_T + lane, 0, mask=is_lane)
    tl.store(lane_done_T + lane, tl.where(used, 0, 1), mask=is_lane)
    tl.store(lane_uniform_T + lane, tl.load(uniform_TM + r * M + at, mask=used, other=0.0), mask=is_lane)


@triton.jit
def _settle(
    token_T, position_T, limit_2T, generated_T, max_new_T, done_T, out_token_TM, out_stats_2TM, lane_done_T,
    lane_out_T, lane_stats_2T, draft_T, drafts_R, counts_2,
    R, M,
    LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    begin(PDL)
    if tl.load(done_T + r) != 0:
        return
    first, most, count = tl.load(generated_T + r), tl.load(max_new_T + r), tl.load(drafts_R + r)
    n, last, ended = first, tl.load(token_T + r), 0
    going = first < most
    for j in tl.static_range(LANES):
        lane = r * LANES + j
        why, token = tl.load(lane_done_T + lane), tl.load(lane_out_T + lane)
        drawn = going & (why != 3)
        tl.store(out_token_TM + r * M + n, token, mask=drawn)
        tl.store(out_stats_2TM + r * M + n, tl.load(lane_stats_2T + lane), mask=drawn)
        entropy = tl.load(lane_stats_2T + R * LANES + lane)
        tl.store(out_stats_2TM + (R + r) * M + n, entropy, mask=drawn)
        n += drawn.to(tl.int32)
        last = tl.where(drawn, token, last)
        ended = tl.where(going, tl.where(why != 0, why, tl.where(n >= most, 2, 0)), ended)
        if j + 1 < LANES:
            going = going & (ended == 0) & (j < count) & (tl.load(draft_T + lane + 1) == token)
    tl.store(generated_T + r, n)
    tl.store(done_T + r, ended)
    tl.atomic_add(counts_2, count)
    tl.atomic_add(counts_2 + 1, tl.maximum(n - first - 1, 0))
    if ended != 0:
        tl.store(limit_2T + R + r, 0)
        return
    tl.store(token_T + r, last)
    tl.store(position_T + r, tl.load(position_T + r) + n - first)
    tl.store(limit_2T + R + r, tl.load(limit_2T + R + r) + n - first)


def propose(rows: RowState, lanes: LaneState) -> None:
    """Look for a draft for each row that has not ended, and write its lanes.

    Args:
        rows: State of the rows.
        lanes: Written, except for the corpora.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    count, most = rows.uniform_TM.shape
    per_row = len(lanes.draft_T) // count
    arguments = pointers(
        "propose", lanes.draft_T, token_T=rows.token_T, position_T=rows.position_T, limit_2T=rows.limit_2T,
        generated_T=rows.generated_T, max_new_T=rows.max_new_T,
        done_T=rows.done_T, uniform_TM=rows.uniform_TM, out_token_TM=rows.out_token_TM,
        lane_token_T=lanes.tokens.token_T, lane_position_T=lanes.tokens.position_T,
        lane_limit_2T=lanes.tokens.limit_2T,
        lane_generated_T=lanes.tokens.generated_T, lane_done_T=lanes.tokens.done_T,
        lane_uniform_T=lanes.tokens.uniform_TM, draft_T=lanes.draft_T, drafts_R=lanes.drafts_R,
        corpus_RC=lanes.corpus_RC, known_R=lanes.known_R,
    )  # fmt: skip
    _propose[(count,)](
        *arguments, count, most, lanes.corpus_RC.shape[1],
        LANES=per_row, LANES_PADDED=triton.next_power_of_2(per_row), MATCH=LONGEST_MATCH, MOST=_MOST,
        BLOCK=_BLOCK, **dependent(rows.token_T),
    )  # fmt: skip


def settle(rows: RowState, lanes: LaneState) -> None:
    """Give each row what its lanes drew, up to the first that is not what was drafted behind it.

    Args:
        rows: State of the rows, advanced by one token at least.
        lanes: As `propose` wrote them and the kernel that draws advanced them.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    count, most = rows.uniform_TM.shape
    arguments = pointers(
        "settle", lanes.draft_T, token_T=rows.token_T, position_T=rows.position_T,
        limit_2T=rows.limit_2T, generated_T=rows.generated_T,
        max_new_T=rows.max_new_T, done_T=rows.done_T, out_token_TM=rows.out_token_TM,
        out_stats_2TM=rows.out_stats_2TM, lane_done_T=lanes.tokens.done_T,
        lane_out_T=lanes.tokens.out_token_TM, lane_stats_2T=lanes.tokens.out_stats_2TM,
        draft_T=lanes.draft_T, drafts_R=lanes.drafts_R, counts_2=lanes.counts_2,
    )  # fmt: skip
    _settle[(count,)](
        *arguments, count, most, LANES=len(lanes.draft_T) // count,
        num_warps=1, **dependent(rows.token_T),
    )  # fmt: skip
