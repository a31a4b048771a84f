"""Prefill of prompts, appended tokens and evicted sequences, in passes of bounded length.

All spans are laid end to end and cut into passes, so short prompts share a pass and a long one takes several.
Within a pass every layer first writes all keys and values, then attends, which is why a span may continue in
the next pass, or read a prompt computed in the same one. A state belongs to one sequence: if layers carry
states, prompts are run first, then their states are copied, then the sequences that start from the copies
are run.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from qerl.families.layer import DeltaNet
from qerl.kernels.decode import attend as attention
from qerl.kernels.tensors import upload
from qerl.rollout.paged.delta_net import Runs
from qerl.rollout.paged.forward import Forward, Inputs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.scheduler import Span
from qerl.rollout.paged.weights import Decoder, kinds_of


class Piece(NamedTuple):
    """Tokens of a span, from ``start`` to before ``stop``, that one pass computes."""

    span: Span
    start: int
    stop: int


class Prefill:
    """Prefill passes over spans.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        pass_tokens: Token counts that passes are built for, ascending.

    Attributes:
        passes: Forward passes by token count.
    """

    def __init__(self, decoder: Decoder, pass_tokens: tuple[int, ...]) -> None:
        self._decoder, self._pass_tokens = decoder, pass_tokens
        kinds = kinds_of(decoder.sizes)
        cuts = [attention.Cut(attention.prefill_rows(kind.group, kind.head_size), 1) for kind in kinds]
        self._cuts = [(cut, cut) for cut in cuts]
        self._together = [cut.rows // kind.group for cut, kind in zip(cuts, kinds, strict=True)]
        self.passes: dict[int, Forward] = {}

    def forget(self) -> None:
        """Drop the buffers of all passes; the next span makes new ones."""
        self.passes.clear()

    def run(self, spans: Sequence[Span], cache: KVCache) -> None:
        """Compute every span, in order; a span may see what spans before it wrote."""
        for pieces in _passes(spans, self._pass_tokens[-1]):
            self._run_pass(pieces, cache)

    def _run_pass(self, pieces: list[Piece], cache: KVCache) -> None:
        tokens = sum(piece.stop - piece.start for piece in pieces)
        size = next(size for size in self._pass_tokens if size >= tokens)
        if size not in self.passes:
            self.passes[size] = Forward(self._decoder, size, self._cuts)
        forward = self.passes[size]
        # The key of a padding token is not stored, because its limit of own tokens is 0.
        columns_6S = np.zeros((6, size), np.int32)
        token_S, position_S, shared_S, own_S, table_S, order_S = columns_6S
        order_S[:] = np.arange(size)
        end = row = 0
        for span, start, stop in pieces:
            here, of_span = slice(end, end + stop - start), np.arange(start, stop)
            end = here.stop
            token_S[here] = span.token_ids[start:stop]
            position_S[here] = span.position + of_span
            shared_S[here], own_S[here] = span.prompt_tokens, span.start + of_span + 1
            table_S[here] = row
            row += 2
        pools = cache.geometry.pools
        tables = [_tables(pieces, pool) for pool in range(len(pools))]
        items = [np.asarray(_items(pieces, together), np.int32) for together in self._together]
        # One copy from pinned memory, so that the host goes on to the next pass. Tables are last: odd widths
        # would leave what follows unaligned.
        parts = [columns_6S, *items, *tables]
        whole = np.concatenate([part.ravel() for part in parts])
        on_device = upload(torch.from_numpy(whole), self._decoder.embedding_VD.device)
        split = on_device.split([part.size for part in parts])
        columns, *others = [each.view(part.shape) for each, part in zip(split, parts, strict=True)]
        inputs = Inputs(
            columns[0], columns[1], columns[2:4], columns[4], others[len(items) :],
            [(item_4, columns[5]) for item_4 in others[: len(items)]],
            self._runs(pieces, pools.index("state")) if "state" in pools else None,
        )  # fmt: skip
        forward.forget_attention()
        forward(cache, inputs)

    def _runs(self, pieces: list[Piece], pool: int) -> Runs:
        """Return the sequences of a pass, each with one piece and its state in this pool."""
        taps = next(s.mixer.taps for s in self._decoder.sizes.specs if isinstance(s.mixer, DeltaNet))
        return Runs.of(
            [piece.span.blocks[pool][0] for piece in pieces],
            [piece.span.position + piece.start for piece in pieces],
            [piece.stop - piece.start for piece in pieces],
            taps,
            self._decoder.embedding_VD.device,
        )


def _tables(pieces: list[Piece], pool: int) -> np.ndarray:
    """Return the block tables of a pass in one pool: per piece its own table, then that of its prompt."""
    spans = [piece.span for piece in pieces]
    rows = [each.get(pool, []) for span in spans for each in (span.blocks, span.prompt_blocks)]
    tables_GB = np.zeros((len(rows), max(1, *map(len, rows))), np.int32)
    for table, row in zip(tables_GB, rows, strict=True):
        table[: len(row)] = row
    return tables_GB


def _items(pieces: list[Piece], together: int) -> list[list[int]]:
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


def _passes(spans: Sequence[Span], most: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each pass, at most ``most`` tokens per pass."""
    pieces: list[Piece] = []
    room = most
    for span in spans:
        start = 0
        while start < len(span.token_ids):
            stop = min(len(span.token_ids), start + room)
            pieces.append(Piece(span, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pieces
                pieces, room = [], most
    if pieces:
        yield pieces
