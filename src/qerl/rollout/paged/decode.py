"""Decode steps of fixed numbers of rows, each captured once and replayed.

All inputs of a step are on the GPU and are advanced there by the sampling kernel (see rows), so replaying the
graph n times decodes n tokens without the host. They include each row's sampling parameters, so a step serves
all temperatures, filters and stop tokens.

The time of a step depends on its number of rows, used or not, so there are steps of many sizes, each captured
when it is first needed. Every round uses the smallest that holds the running sequences. Switching costs some
copies on the GPU, a hundredth of a round; a smaller step saves a tenth to a third of a round, from the first
sequence that ends with an empty queue to the last long ones that run alone.
"""

from collections import abc
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

from qerl.families.sizes import Sizes
from qerl.kernels.decode import attend as attention
from qerl.kernels.decode.draw import BLOCK_V, cap_logits, draw_token
from qerl.kernels.device import multiprocessors
from qerl.kernels.limits import PAGE
from qerl.kernels.tensors import product
from qerl.rollout.paged.forward import Forward
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import rows_of_step
from qerl.rollout.paged.machine import Graphs, Machine
from qerl.rollout.paged.rows import Rows
from qerl.rollout.paged.scheduler import Scheduler
from qerl.rollout.paged.weights import Decoder, Kind, kinds_of
from qerl.rollout.session import Sequence

LONG, VERY_LONG = 64, 128
"""Minimum pages of long tables and of very long contexts."""

MOST_SPLITS, MOST_LONG_SPLITS = 8, 32
"""Maximum splits of a work item, and of an item in a very long context or at a prompt in a launch of its
own."""

TWICE, LONG_TWICE = 8, 32
"""Maximum rows that take twice the splits that fill the GPU, with long tables and in very long contexts."""

APART = ((96, 0), (32, 16), (8, LONG))
"""Minimum rows of a step and pages of its longest shared prompt, of which one pair must be met, for reading
prompts in a launch of their own."""

PROMPT_PAGES = 8
"""Minimum pages of a table per split of a prompt that has a launch of its own."""

UNEVEN = 6
"""Pages by which the longest item must exceed the mean of its kind for items to be uneven."""

LEAST_PAGES = 4
"""Minimum pages of a part of an uneven item."""

MOST_PARTS, MOST_PROGRAMS = 8, 4096
"""Maximum parts of an uneven item, and of items times KV heads times parts: parts without keys cost time."""


class Way(NamedTuple):
    """How a step attends, which each round decides from its running sequences.

    Attributes:
        apart: Whether prompts have a launch of their own, see `qerl.kernels.decode.attend`.
        long: Whether few rows read a very long context in the launch of own tokens, which has the prompts,
            too, unless they are apart.
        parts: Splits that the longest item of that launch is worth if it is far longer than the mean, else 1.
            Used where items have fewer splits otherwise.
    """

    apart: bool
    long: bool
    parts: int = 1


WAYS = [
    Way(apart, long, parts) for apart in (False, True) for long in (False, True) for parts in (1, 2, 4, 8)
]


def kinds_apart(sizes: Sizes, device: torch.device) -> list[Kind]:
    """Return the kinds of attention that have larger tiles for prompts in a launch of their own."""
    return [
        kind
        for kind in kinds_of(sizes)
        if attention.prompt_rows(kind.group, kind.head_size, device) > attention.decode_rows(kind.group)
    ]


def way_to_attend(kinds: abc.Collection[Kind], rows: int, running: abc.Collection[Sequence]) -> Way:
    """Return how a step attends.

    Args:
        kinds: Kinds of attention, as `kinds_apart` returns them.
        rows: Rows of the step.
        running: The running sequences, at least one.
    """
    prompts = {sequence.prompt for sequence in running}
    shared = _pages(max(prompt.shared_tokens for prompt in prompts))
    apart = _prompts_apart(kinds, rows, len(running) / len(prompts), shared)
    own = [sequence.own_tokens for sequence in running]
    items = own if apart else max(own, [prompt.shared_tokens for prompt in prompts], key=max)
    longest = _pages(max(items))
    uneven = longest - sum(items) / len(items) / PAGE >= UNEVEN
    parts = _power_of_2(min(MOST_PARTS, longest // LEAST_PAGES)) if uneven else 1
    return Way(apart, rows <= LONG_TWICE and longest >= VERY_LONG, parts)


def _prompts_apart(kinds: abc.Collection[Kind], rows: int, samples: float, pages: int) -> bool:
    """Return True if prompts have a launch of their own.

    That pays off if prompts have on average more samples than a small tile holds, and for few rows only if
    there is much to read. Gain of 7B on an H200 in percent, groups of 8, by rows and prompt tokens, over one
    launch with as many splits, after 8192 tokens over one with twice those that fill the GPU
    (ways-7b-apart-few-h200.json, ways-7b-prompts-*-h200.json, ways-7b-longest-prompts-h200.json):

    ====== ==== ===== ===== ===== =======
     rows   256  1024  3072  8192  32,768
    ====== ==== ===== ===== ===== =======
         8 -2.2  -2.8  +1.7   +15      +6
        32 +2.3  +8.5   +38   +55
        64 -0.7  +8.0   +33   +78    +239
    ====== ==== ===== ===== ===== =======

    With up to 32 splits of a prompt, 8 rows gain 74 % after 32,768 tokens. If each row has a prompt of its
    own, of 1024 tokens, 96 to 256 rows are 2 % slower (ways-7b-own-prompts-h200.json).

    Args:
        kinds: Kinds of attention, as `kinds_apart` returns them.
        rows: Rows of the step.
        samples: Mean number of running samples per prompt.
        pages: Pages of the longest shared prompt.
    """
    small_tiles = [attention.decode_rows(kind.group) // kind.group for kind in kinds]
    return bool(small_tiles) and samples > min(small_tiles) and _enough_to_read(rows, pages)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _power_of_2(most: int) -> int:
    return 1 << (most.bit_length() - 1)


def _enough_to_read(rows: int, pages: int) -> bool:
    return any(rows >= fewest and pages >= shortest for fewest, shortest in APART)


def attention_splits(
    rows: int, kv_heads: int, multiprocessors: int, pages: int, most: int = MOST_SPLITS, twice: int = TWICE
) -> int:
    """Return the number of splits of an attention item's keys, such that few rows still fill the GPU.

    It is a power of two, and at most the number of pages of a table: a split without a page reads nothing,
    but its result is combined like the others. Twice the number that fills the GPU costs more to combine than
    it gains, except after long contexts. 7B on an H200 (attention-splits-7b-h200.json): after 256 tokens one
    row is 2.9 % faster with 4 splits than with 8; after 4096 tokens eight rows are 11 % faster with 8 than
    with 4, after 1024 tokens 1 % slower. After 8192 tokens one row is 9.9 % faster with 32 than with 8 and
    four are 3.5 % faster with 16, after 32,768 tokens 37 and 24 % (ways-7b-one-row-8k-h200.json, -32k-). 16
    and 32 rows with a prompt of 8192 tokens each are 19 and 30 % faster with 4 and 2 than with half as many
    (ways-7b-own-prompts-8k-h200.json).

    Args:
        rows: Work items, such as rows of the step.
        kv_heads: KV heads.
        multiprocessors: Multiprocessors of the GPU.
        pages: Pages that an item may read.
        most: Maximum number of splits.
        twice: Maximum rows for which long tables get twice the splits that fill the GPU.
    """
    filling = multiprocessors // (rows * kv_heads)
    wanted = max(1, min(2 * filling if pages >= LONG and rows <= twice else filling, pages))
    return min(most, _power_of_2(wanted))


def attention_cuts(
    kind: Kind, tokens: int, table_width: int, way: Way, device: torch.device
) -> tuple[attention.Cut, attention.Cut]:
    """Return the cuts of attention items at shared prompts, and of those at own tokens.

    Args:
        kind: Kind of attention. If its window hides most of a long context, it is cut as for a short one. Of
            heads wider than 256, more than `MOST_SPLITS` would take more registers to combine than there are.
        tokens: Tokens of the step.
        table_width: Cache blocks of the longest table.
        way: How the step attends.
        device: Where the step runs.
    """
    pages = table_width if kind.window is None else min(table_width, kind.window // PAGE + 1)
    filled = kind.kv_heads, multiprocessors(device)
    more = way.long and pages >= VERY_LONG and kind.head_size <= 256
    limits = (MOST_LONG_SPLITS, LONG_TWICE) if more else (MOST_SPLITS, TWICE)
    splits = attention_splits(tokens, *filled, pages, *limits)
    own = attention.Cut(attention.decode_rows(kind.group), splits)
    parts = min(way.parts, MOST_PROGRAMS // (tokens * kind.kv_heads))
    if parts > splits and kind.window is None and kind.head_size <= 256:
        own = attention.Cut(own.rows, _power_of_2(parts), LEAST_PAGES)
    if not way.apart or not _enough_to_read(tokens, pages):
        return own, own
    rows = attention.prompt_rows(kind.group, kind.head_size, device)
    if rows == own.rows:
        return own, own
    items = triton.cdiv(tokens, rows // kind.group)
    splits = attention_splits(items, *filled, pages // PROMPT_PAGES, MOST_LONG_SPLITS)
    return attention.Cut(rows, splits), own


class DecodeStep:
    """A decode step for a fixed number of rows, captured when it is first needed.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        cache: The KV cache.
        rows: Number of rows.
        max_new: Maximum tokens of a sequence.
        table_width: Maximum cache blocks of a sequence, and of a prompt.
        graphs: Captures the step.

    Attributes:
        rows: The rows of the batch.
        way: Number of the way to attend, of those with different cuts; `attend` decides it from the running
            sequences. Each is captured when it is first needed; all share rows and buffers.
        number_of: Number of each way; ways with equal cuts have one.
        forward: The pass over the decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: int,
        max_new: int,
        table_width: int,
        graphs: Graphs,
    ) -> None:
        device, kinds = decoder.embedding_VD.device, kinds_of(decoder.sizes)

        self._decoder, self._cache, self._graphs, self.way = decoder, cache, graphs, 0
        self._kinds = kinds_apart(decoder.sizes, device)
        cuts = {
            way: tuple(attention_cuts(kind, rows, table_width, way, device) for kind in kinds) for way in WAYS
        }
        different = [*dict.fromkeys(cuts.values())]
        self.number_of = {way: different.index(cut) for way, cut in cuts.items()}
        self.forward = Forward(decoder, rows, *different)
        self._together = [
            [prompts.rows // kind.group for (prompts, _), kind in zip(cut, kinds, strict=True)]
            for cut in different
        ]
        self.rows = Rows(rows, max_new, table_width, len(cache.geometry.pools), len(kinds), device)
        blocks = triton.cdiv(decoder.head_VD.shape[0], BLOCK_V)
        self._stats_3TB = torch.empty(3, rows, blocks, device=device)
        # Sums of squares whose rms is 1, for capped logits, which are already divided by theirs.
        width, eps = decoder.sizes.hidden, decoder.eps
        self._unit_1T = torch.full((1, rows), width * (1.0 - eps), device=device)
        self._replays: dict[int, Callable[[], None]] = {}

    def attend(self, running: abc.Mapping[int, Sequence]) -> None:
        """Decide how to attend, and upload the block tables and work items of running sequences."""
        self.way = self.number_of[way_to_attend(self._kinds, self.rows.count, running.values())]
        self.forward.cut_as(self.way)
        self.rows.attend(running, self._together[self.way])
        self.forward.forget_attention()

    def decode(self, steps: int) -> None:
        """Replay the step ``steps`` times, each time for one token of every row that has not ended."""
        replay = self._replays.get(self.way) or self.capture()
        for _ in range(steps):
            replay()

    def run(self) -> None:
        """Decode one token as a captured step does, without a graph."""
        u_TD = self.forward(self._cache, self.rows.inputs)
        logits_TV = product(u_TD, self._decoder.head_VD.T)
        sizes, eps, squares_PT = self._decoder.sizes, self._decoder.eps, self.forward.squares_PT
        if sizes.logit_cap is not None:
            cap_logits(logits_TV, squares_PT, cap=sizes.logit_cap, width=sizes.hidden, eps=eps)
            squares_PT = self._unit_1T
        draw_token(
            logits_TV, squares_PT, self._stats_3TB, self.rows.state, self.rows.settings,
            width=sizes.hidden, eps=eps,
        )  # fmt: skip

    def capture(self) -> Callable[[], None]:
        """Capture the step for the present `way`; `decode` calls this when first needed."""
        # Warming up must compile every kernel but change no state: with all rows ended it changes none.
        state = self.rows.state
        done_T, limit_2T = state.done_T.clone(), state.limit_2T.clone()
        self.rows.clear()
        try:
            replay = self._replays[self.way] = self._graphs.capture(self.run, done_T.device)
        finally:
            state.done_T.copy_(done_T)
            state.limit_2T.copy_(limit_2T)
        return replay


class DecodeGraphs:
    """The decode steps of one model and one cache.

    Args:
        decoder: The weights.
        cache: The KV cache.
        machine: The machine on which steps are captured.
        small_rows: Rows up to which a step is not replaced with a smaller one, see `Pace`.

    Attributes:
        steps: Steps by number of rows.
        pool: Captures these steps, and prefill passes, in one pool of memory.
        table_width: Maximum cache blocks of a sequence, and of a prompt.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, machine: Machine, small_rows: int) -> None:
        self._decoder, self._cache, self._machine = decoder, cache, machine
        self._small_rows = small_rows
        self.close()

    def close(self) -> None:
        """Drop all steps, and reset the sequence length and table width that new steps are made for."""
        self._max_new = self.table_width = 0
        self.forget()

    def forget(self) -> None:
        """Drop all steps, with their buffers and graph memory."""
        self.steps: dict[int, DecodeStep] = {}
        self.pool = self._machine.graphs()

    def serves(self, max_new: int, table_width: int) -> bool:
        """Return True if steps take ``max_new`` tokens per sequence and ``table_width`` blocks per table."""
        return max_new <= self._max_new and table_width <= self.table_width

    def make_room(self, max_new: int, table_width: int) -> None:
        """Make steps and prefill passes created from now on large enough for such sequences and tables."""
        self._max_new = max(self._max_new, max_new)
        self.table_width = max(self.table_width, table_width)

    def fit(self, step: DecodeStep | None, scheduler: Scheduler, entering: list[Sequence]) -> DecodeStep:
        """Switch to the smallest step that holds the running sequences, and return it.

        Args:
            step: The step in use; None at the start of a call.
            scheduler: The scheduler; it moves its sequences into the first rows if the step changes.
            entering: Running sequences that are in no row on the GPU yet.
        """
        running = scheduler.running
        present = None if step is None else step.rows.count
        rows = rows_of_step(len(running), present, self._small_rows)
        if step is not None and rows == present:
            return step
        chosen = self.step(rows)
        new = set(entering)
        staying = [row for row, sequence in running.items() if sequence not in new]
        moved = scheduler.compact(chosen.rows.count)
        chosen.rows.clear()
        if step is not None:
            chosen.rows.move(step.rows, {row: moved[row] for row in staying})
        return chosen

    def step(self, rows: int) -> DecodeStep:
        """Return or make the step of ``rows`` rows, one of `qerl.rollout.paged.limits.ROW_COUNTS`."""
        if rows not in self.steps:
            self.steps[rows] = DecodeStep(
                self._decoder, self._cache, rows, self._max_new, self.table_width, self.pool
            )
        return self.steps[rows]
