"""Prefill of prompts, appended tokens and evicted sequences, in passes of bounded length.

All spans are laid end to end and cut into passes, so short prompts share a pass and a long one takes several.
Within a pass every layer first writes all keys and values, then attends, which is why a span may continue in
the next pass, or read a prompt computed in the same one. A state belongs to one sequence: if layers carry
states, prompts are run first, then their states are copied, then the sequences that start from the copies
are run.

The host needs longer to launch the kernels of a short pass than the GPU to run them, and short passes are
many: prompts of new groups while others decode, tokens that agents append. So those are captured like decode
steps, with inputs in fixed places and room for a bounded number of pieces, and kept while the model trains. A
long pass takes the GPU longer than the host; it is launched kernel by kernel, and its buffers are freed for
training. Launched are also all passes of a model whose layers carry states, because their shapes depend on
the spans, and those whose products would dequantise a weight, which a graph would keep for good.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton

from qerl.families.layer import DeltaNet
from qerl.kernels.decode import attend as attention
from qerl.kernels.tensors import upload
from qerl.kernels.weights.nvfp4 import most_tokens
from qerl.rollout.paged.decode import DecodeGraphs
from qerl.rollout.paged.delta_net import Runs
from qerl.rollout.paged.forward import Forward, Inputs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import CAPTURED_TOKENS
from qerl.rollout.paged.scheduler import Span
from qerl.rollout.paged.weights import Decoder, kinds_of


class Piece(NamedTuple):
    """Tokens of a span, from ``start`` to before ``stop``, that one pass computes."""

    span: Span
    start: int
    stop: int


class Pass:
    """A prefill pass over at most a fixed number of tokens.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        cache: The KV cache.
        tokens: Maximum number of tokens.
        graphs: Captured decode steps, with whose pool of memory the pass is captured.
        captured: Whether the pass is captured, when it is first run, and then replayed.

    Attributes:
        forward: The pass over the decoder.
        captured: As given.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, tokens: int, graphs: DecodeGraphs, captured: bool
    ) -> None:
        device, kinds = decoder.embedding_VD.device, kinds_of(decoder.sizes)
        cuts = [attention.Cut(attention.prefill_rows(kind.group, kind.head_size), 1) for kind in kinds]
        self._decoder, self._cache, self._pool = decoder, cache, graphs.pool
        self._pools, self._table_width = cache.geometry.pools, graphs.table_width
        self._tokens, self._device = tokens, device
        self.forward = Forward(decoder, tokens, [(cut, cut) for cut in cuts])
        self.captured = captured
        self._replay: Callable[[], None] | None = None
        self._together = [cut.rows // kind.group for cut, kind in zip(cuts, kinds, strict=True)]
        self._order = torch.arange(tokens, dtype=torch.int32, device=device)
        self._inputs: Inputs | None = None
        if captured:
            # A piece is read by items at its own keys and as many at its prompt.
            most = most_pieces(tokens, captured=True)
            items = [2 * (most + triton.cdiv(tokens, each)) for each in self._together]
            self._shapes = self._layout(most, items)
            size = sum(map(math.prod, self._shapes))
            self._fixed = torch.zeros(size, dtype=torch.int32, device=device)
            self._inputs = self._inputs_of(self._fixed, self._shapes)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Compute the pieces, at most `most_pieces`, of at most the pass's tokens together."""
        items = [_items(pieces, together) for together in self._together]
        if self.captured:
            # What follows the used rows of the last table is as it was, and no token or item refers to it.
            *shapes, (_, width) = self._shapes
            given = self._written(pieces, items, [*shapes, (2 * len(pieces), width)])
            upload(given, self._device, to=self._fixed[: len(given)])
            if self._replay is None:
                self._replay = self._pool.capture(self._compute, self._device)
            self._replay()
            return
        shapes = self._layout(len(pieces), [*map(len, items)])
        flat = upload(self._written(pieces, items, shapes), self._device)
        self._inputs = self._inputs_of(flat, shapes)
        if "state" in self._pools:
            self._inputs.runs = self._runs(pieces)
        self._compute()

    def _compute(self) -> None:
        assert self._inputs is not None
        self.forward.forget_attention()
        self.forward(self._cache, self._inputs)

    def _layout(self, pieces: int, items: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shapes of a pass's inputs, which lie end to end: columns of tokens, the items of each
        kind of attention, and the tables of each pool, last because odd widths would leave what follows
        unaligned."""
        tables = [(2 * pieces, self._table_width)] * len(self._pools)
        return [(5, self._tokens), *((count, 4) for count in items), *tables]

    def _inputs_of(self, flat: torch.Tensor, shapes: list[tuple[int, int]]) -> Inputs:
        columns, *others = _parts(flat, shapes)
        items, tables = others[: len(self._together)], others[len(self._together) :]
        return Inputs(
            columns[0], columns[1], columns[2:4], columns[4], tables,
            [(item_4, self._order) for item_4 in items],
        )  # fmt: skip

    def _written(
        self, pieces: Sequence[Piece], items: list[list[list[int]]], shapes: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Return the inputs of these pieces on the CPU, laid end to end."""
        flat = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.int32)
        columns, *others = (part.numpy() for part in _parts(flat, shapes))
        # The key of a padding token is not stored, because its limit of own tokens is 0.
        token_S, position_S, shared_S, own_S, table_S = columns
        end = row = 0
        for span, start, stop in pieces:
            here, of_span = slice(end, end + stop - start), np.arange(start, stop)
            end = here.stop
            token_S[here] = span.token_ids[start:stop]
            position_S[here] = span.position + of_span
            shared_S[here], own_S[here] = span.prompt_tokens, span.start + of_span + 1
            table_S[here] = row
            row += 2
        for item_4, found in zip(others, items, strict=False):
            item_4[: len(found)] = found
        for pool, tables_GB in enumerate(others[len(items) :]):
            _write_tables(pieces, pool, tables_GB)
        return flat

    def _runs(self, pieces: Sequence[Piece]) -> Runs:
        """Return the sequences of a pass, each with one piece and its state."""
        pool = self._pools.index("state")
        taps = next(s.mixer.taps for s in self._decoder.sizes.specs if isinstance(s.mixer, DeltaNet))
        return Runs.of(
            [piece.span.blocks[pool][0] for piece in pieces],
            [piece.span.position + piece.start for piece in pieces],
            [piece.stop - piece.start for piece in pieces],
            taps,
            self._device,
        )


class Prefill:
    """Prefill passes over spans.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        cache: The KV cache.
        graphs: Captured decode steps. What drops them drops the passes, too.
        pass_tokens: Token counts that passes are built for, ascending.

    Attributes:
        passes: Passes by token count.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, graphs: DecodeGraphs, pass_tokens: tuple[int, ...]
    ) -> None:
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self._pass_tokens = pass_tokens
        self.passes: dict[int, Pass] = {}

    def forget(self) -> None:
        """Drop all passes, with their buffers; the next spans make new ones."""
        self.passes.clear()

    def free(self) -> None:
        """Drop the passes that are not captured, whose buffers are the largest."""
        self.passes = {tokens: each for tokens, each in self.passes.items() if each.captured}

    def run(self, spans: Sequence[Span]) -> None:
        """Compute every span, in order; a span may see what spans before it wrote."""
        longest = self._pass_tokens[-1]
        for pieces in _passes(spans, longest, most_pieces(longest, self._captured(longest))):
            self._pass_of(pieces).run(pieces)

    def _pass_of(self, pieces: Sequence[Piece]) -> Pass:
        """Return or make the smallest pass that has room for these pieces."""
        tokens = sum(piece.stop - piece.start for piece in pieces)
        sizes = (size for size in self._pass_tokens if size >= tokens)
        size = next(size for size in sizes if most_pieces(size, self._captured(size)) >= len(pieces))
        if size not in self.passes:
            captured = self._captured(size)
            self.passes[size] = Pass(self._decoder, self._cache, size, self._graphs, captured)
        return self.passes[size]

    def _captured(self, tokens: int) -> bool:
        """Return True if a pass of so many tokens is captured.

        Products of more tokens than this project's own takes may dequantise a weight.
        """
        own = most_tokens(self._decoder.embedding_VD.device)
        return tokens <= min(CAPTURED_TOKENS, own) and "state" not in self._cache.geometry.pools


def most_pieces(tokens: int, captured: bool) -> int:
    """Return the maximum pieces of a pass of so many tokens.

    The attention kernel's grid has places for all items of a captured pass, of which it skips the unused
    ones. A pass that is launched has no more places than it needs.
    """
    return max(1, tokens // 4) if captured else tokens


def _parts(flat: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Return views of these shapes that lie end to end."""
    parts = flat.split([*map(math.prod, shapes)])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _write_tables(pieces: Sequence[Piece], pool: int, tables_GB: np.ndarray) -> None:
    """Write the block tables of a pass in one pool: per piece its own table, then that of its prompt."""
    rows = [each.get(pool, []) for span, *_ in pieces for each in (span.blocks, span.prompt_blocks)]
    for table, row in zip(tables_GB, rows, strict=False):
        table[: len(row)] = row


def _items(pieces: Sequence[Piece], together: int) -> list[list[int]]:
    """Return work items of at most ``together`` tokens: a piece at its own keys, and at its prompt if any."""
    items: list[list[int]] = []
    begin = 0
    for number, (span, start, stop) in enumerate(pieces):
        end = begin + stop - start
        for table, half in [(2 * number, 1)] + ([(2 * number + 1, 0)] if span.prompt_tokens else []):
            for first in range(begin, end, together):
                items.append([first, min(together, end - first), table, half])
        begin = end
    return items


def _passes(spans: Sequence[Span], tokens: int, most: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each pass, at most ``most`` pieces of at most ``tokens`` tokens together."""
    pieces: list[Piece] = []
    room = tokens
    for span in spans:
        start = 0
        while start < len(span.token_ids):
            stop = min(len(span.token_ids), start + room)
            pieces.append(Piece(span, start, stop))
            room -= stop - start
            start = stop
            if not room or len(pieces) == most:
                yield pieces
                pieces, room = [], tokens
    if pieces:
        yield pieces
