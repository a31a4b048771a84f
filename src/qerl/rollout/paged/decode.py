"""Decode steps of fixed numbers of rows, each captured once and replayed.

Everything a step needs is on the GPU and is advanced there by the kernel that draws (see rows), so replaying
the graph n times decodes n tokens without the host. How a row draws is among that, so the steps serve all
temperatures, filters and stop tokens.

A step takes as long as its rows say, used or not, so there are steps of many sizes, each captured when it is
first needed. Every round takes the smallest that holds what runs. To move to another costs some copies on the
GPU, a hundredth of a round; a smaller step saves a tenth to a third of it, from the first sequence that ends
with nobody waiting to the last long ones that are alone.
"""

from collections import abc
from collections.abc import Callable

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

LONG, FEW = 64, 8
"""Pages of a table from which on it is a long one, and rows up to which they are few."""

MOST_SPLITS, MOST_PROMPT_SPLITS = 8, 32
"""The most splits of an item, and of one at a prompt that has a launch of its own."""

APART = 96
"""Rows from which on prompts are read in a launch of their own; behind long ones it is `FEW`. With 64 rows
behind 256 tokens one launch is 0.7 % faster, and with 8 it is 2.2 %; with 32 it is 2.3 % slower
(ways-7b-apart-few-h200.json)."""

PROMPT_PAGES = 8
"""Pages of a prompt that has a launch of its own which a split has at least."""


def kinds_apart(sizes: Sizes, device: torch.device) -> list[Kind]:
    """The kinds of a model's attention that have larger tiles for prompts in a launch of their own."""
    return [
        kind
        for kind in kinds_of(sizes)
        if attention.prompt_rows(kind.group, kind.head_size, device) > attention.decode_rows(kind.group)
    ]


def prompts_apart(kinds: abc.Iterable[Kind], rows: int, running: abc.Collection[Sequence]) -> bool:
    """Whether a step reads prompts in a launch of their own, see `qerl.kernels.decode.attend`.

    That is worth it where a prompt's samples are, in the mean, more than a small tile holds. 7B on an H200,
    groups of 8 (ways-7b-long-prompts-h200.json, ways-7b-longest-prompts-h200.json): behind 8192 tokens 8, 32
    and 64 rows are 15, 110 and 79 % faster, behind 32,768 tokens 8 and 64 rows 74 and 239 %. Where each row
    has a prompt of its own, of 1024 tokens, 96 to 256 rows are 2 % slower (ways-7b-own-prompts-h200.json).
    Prompts between 256 and 8192 tokens were not timed with fewer than `APART` rows.

    Args:
        kinds: Of attention, those of `kinds_apart`.
        rows: Of the step.
        running: What runs there.
    """
    prompts = {sequence.prompt for sequence in running}
    small_tiles = [attention.decode_rows(kind.group) // kind.group for kind in kinds]
    if not small_tiles or len(running) <= min(small_tiles) * len(prompts):
        return False
    longest = max(prompt.shared_tokens for prompt in prompts)
    return rows >= (FEW if longest >= LONG * PAGE else APART)


def attention_splits(rows: int, kv_heads: int, multiprocessors: int, pages: int, most: int) -> int:
    """Into how many splits the keys of an attention item are divided, so that few rows still fill the GPU.

    It is a power of two, and no more than a table has pages: a split without a page has nothing to read, and
    its part of the result is combined like the others. Twice as many as fill the GPU cost more to combine
    than they gain, but behind long contexts. 7B on an H200 (attention-splits-7b-h200.json): one row behind
    256 tokens is 2.9 % faster with 4 splits than with 8, eight rows behind 4096 tokens are 11 % faster with 8
    than with 4, behind 1024 tokens 1 % slower.

    Args:
        rows: Of the step.
        kv_heads: Heads of keys.
        multiprocessors: Of the GPU.
        pages: Cache blocks of the longest table.
        most: Splits.
    """
    filling = multiprocessors // (rows * kv_heads)
    wanted = max(1, min(2 * filling if pages >= LONG and rows <= FEW else filling, pages))
    return min(most, 1 << (wanted.bit_length() - 1))


def attention_cuts(
    kind: Kind, tokens: int, table_width: int, apart: bool, device: torch.device
) -> tuple[attention.Cut, attention.Cut]:
    """How attention cuts items at shared prompts, and those at own tokens.

    Args:
        kind: Of attention. One whose window hides most of a long prompt is cut as behind a short one.
        tokens: Of the step.
        table_width: Cache blocks of the longest table.
        apart: Whether prompts have a launch of their own.
        device: Where the step runs.
    """
    pages = table_width if kind.window is None else min(table_width, kind.window // PAGE + 1)
    filled = kind.kv_heads, multiprocessors(device)
    splits = attention_splits(tokens, *filled, pages, MOST_SPLITS)
    own = attention.Cut(attention.decode_rows(kind.group), splits)
    if not apart or (tokens < APART and pages < LONG):
        return own, own
    rows = attention.prompt_rows(kind.group, kind.head_size, device)
    if rows == own.rows:
        return own, own
    items = triton.cdiv(tokens, rows // kind.group)
    splits = attention_splits(items, *filled, pages // PROMPT_PAGES, MOST_PROMPT_SPLITS)
    return attention.Cut(rows, splits), own


class DecodeStep:
    """The captured step.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        cache: Keys and values.
        rows: Sequences that run side by side.
        max_new: Tokens that a sequence may generate.
        table_width: Cache blocks that a sequence may own, and a prompt too.
        graphs: Where the step is captured.

    Attributes:
        rows: The batch.
        apart: Whether prompts have a launch of their own, which `attend` decides from what runs. Each way is
            captured when it is first needed; both share rows and buffers.
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

        self._decoder, self._cache, self._graphs, self.apart = decoder, cache, graphs, False
        self._kinds = kinds_apart(decoder.sizes, device)
        cuts = [
            [attention_cuts(kind, rows, table_width, apart, device) for kind in kinds]
            for apart in (False, True)
        ]
        self.forward = Forward(decoder, rows, *cuts)
        self._together = [
            [prompts.rows // kind.group for (prompts, _), kind in zip(way, kinds, strict=True)]
            for way in cuts
        ]
        self.rows = Rows(rows, max_new, table_width, len(cache.geometry.pools), len(kinds), device)
        blocks = triton.cdiv(decoder.head_VD.shape[0], BLOCK_V)
        self._stats_3TB = torch.empty(3, rows, blocks, device=device)
        # Sums of squares of logits that a cap has already divided by their rms.
        width, eps = decoder.sizes.hidden, decoder.eps
        self._unit_1T = torch.full((1, rows), width * (1.0 - eps), device=device)
        self._replays: dict[bool, Callable[[], None]] = {}

    def attend(self, running: abc.Mapping[int, Sequence]) -> None:
        """Decide how prompts are read, and write what the attention of everything that runs reads."""
        self.apart = prompts_apart(self._kinds, self.rows.count, running.values())
        self.forward.cut_as(self.apart)
        self.rows.attend(running, self._together[self.apart])
        self.forward.forget_attention()

    def decode(self, steps: int) -> None:
        """Decode so many tokens of every row that has not ended."""
        replay = self._replays.get(self.apart) or self.capture()
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
        """Record the step as it attends now, which `decode` otherwise does when it first attends so."""
        # Warming up must compile every kernel but change nothing: with all rows ended it does not.
        state = self.rows.state
        done_T, limit_2T = state.done_T.clone(), state.limit_2T.clone()
        self.rows.clear()
        try:
            replay = self._replays[self.apart] = self._graphs.capture(self.run, done_T.device)
        finally:
            state.done_T.copy_(done_T)
            state.limit_2T.copy_(limit_2T)
        return replay


class DecodeGraphs:
    """Steps of one model over one cache.

    Args:
        decoder: The weights.
        cache: Keys and values.
        machine: Where steps are captured.
        small_rows: Rows up to which no smaller step is taken, see `Pace`.

    Attributes:
        steps: Steps by rows.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, machine: Machine, small_rows: int) -> None:
        self._decoder, self._cache, self._machine = decoder, cache, machine
        self._small_rows = small_rows
        self.close()

    def close(self) -> None:
        """Forget the present steps, and what sequences and tables those to come are made for."""
        self._max_new = self._table_width = 0
        self.forget()

    def forget(self) -> None:
        """Drop all steps, with their buffers and graph memory."""
        self.steps: dict[int, DecodeStep] = {}
        self._graphs = self._machine.graphs()

    def serves(self, max_new: int, table_width: int) -> bool:
        """True if steps take sequences of so many new tokens and tables of so many blocks."""
        return max_new <= self._max_new and table_width <= self._table_width

    def make_room(self, max_new: int, table_width: int) -> None:
        """Forget the present steps, and make those to come large enough for such sequences and tables."""
        self._max_new = max(self._max_new, max_new)
        self._table_width = max(self._table_width, table_width)

    def fit(self, step: DecodeStep | None, scheduler: Scheduler, entering: list[Sequence]) -> DecodeStep:
        """Switch to the smallest step that holds what runs.

        Args:
            step: The step in use; None at the start of a call.
            scheduler: What runs; its sequences are moved into the first rows if the step changes.
            entering: Those of them that are in no row on the GPU yet.
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
        """The step of so many rows, one of `qerl.rollout.paged.limits.ROW_COUNTS`."""
        if rows not in self.steps:
            self.steps[rows] = DecodeStep(
                self._decoder, self._cache, rows, self._max_new, self._table_width, self._graphs
            )
        return self.steps[rows]
