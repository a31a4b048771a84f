"""Keys and values of prompts, of what others wrote, and of what was given up, in passes of bounded length.

All spans that have something to compute are laid end to end and cut into passes, so short prompts share a
pass and a long one takes several. Within a pass every layer first writes all keys and values, then attends,
which is why a span may continue in the next pass, or read a prompt computed in the same one.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from qerl.kernels.decode import attend as attention
from qerl.kernels.device import upload
from qerl.kernels.limits import PAGE
from qerl.rollout.paged.forward import Forward, Inputs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.scheduler import Span
from qerl.rollout.paged.weights import Decoder


class Piece(NamedTuple):
    """Tokens of a span, from ``start`` to before ``stop``, that one pass computes."""

    span: Span
    start: int
    stop: int


class Prefill:
    """Runs spans through the decoder.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        pass_tokens: Numbers of tokens that a pass is made for, ascending.

    Attributes:
        passes: Passes over the decoder, by tokens.
    """

    def __init__(self, decoder: Decoder, pass_tokens: tuple[int, ...]) -> None:
        self._decoder, self._pass_tokens = decoder, pass_tokens
        self.passes: dict[int, Forward] = {}

    def forget(self) -> None:
        """Drop the buffers of all passes; the next span makes them anew."""
        self.passes.clear()

    def run(self, spans: Sequence[Span], cache: KVCache) -> None:
        """Compute every span, in order; a span may see what spans before it wrote."""
        for pieces in _passes(spans, self._pass_tokens[-1]):
            self._run_pass(pieces, cache)

    def _run_pass(self, pieces: list[Piece], cache: KVCache) -> None:
        tokens = sum(piece.stop - piece.start for piece in pieces)
        size = next(size for size in self._pass_tokens if size >= tokens)
        if size not in self.passes:
            self.passes[size] = Forward(self._decoder, size, splits=1, tile=attention.PREFILL_ROWS)
        forward = self.passes[size]
        columns_6S = np.zeros((6, size), np.int32)
        token_S, position_S, slot_S, shared_S, own_S, order_S = columns_6S
        slot_S.fill(-1)
        order_S[:] = np.arange(size)
        end = 0
        for span, start, stop in pieces:
            here, of_span = slice(end, end + stop - start), np.arange(start, stop)
            end, place = here.stop, span.start + of_span
            token_S[here] = span.token_ids[start:stop]
            position_S[here] = span.position + of_span
            slot_S[here] = np.asarray(span.blocks)[place // PAGE] * PAGE + place % PAGE
            shared_S[here], own_S[here] = span.prompt_tokens, place + 1
        items_4, tables = (np.asarray(rows, np.int32) for rows in self._items(pieces))
        # One copy from pinned memory, so that the host goes on to the next pass. Tables are last: odd widths
        # would leave what follows unaligned.
        whole = np.concatenate([columns_6S.ravel(), items_4.ravel(), tables.ravel()])
        on_device = upload(torch.from_numpy(whole), self._decoder.embedding_VD.device)
        columns, items, of_tables = on_device.split([columns_6S.size, items_4.size, tables.size])
        token, position, slots, *_, order = columns.view(6, size)
        limits = columns.view(6, size)[3:5]
        inputs = Inputs(
            token, position, slots, limits, of_tables.view(tables.shape), items.view(items_4.shape), order
        )
        forward.lse_ZTH.fill_(-torch.inf)
        forward(cache, inputs)

    def _items(self, pieces: list[Piece]) -> tuple[list[list[int]], list[list[int]]]:
        """Attention items and block tables of a pass: each span at its own keys, and at its prompt if it has
        one."""
        tile = attention.PREFILL_ROWS // self._decoder.sizes.spec.mixer.group
        width = max(max(len(piece.span.blocks), len(piece.span.prompt_blocks)) for piece in pieces)
        items: list[list[int]] = []
        tables: list[list[int]] = []
        begin = 0
        for span, start, stop in pieces:
            end = begin + stop - start
            rows = [(span.blocks, 1)] + ([(span.prompt_blocks, 0)] if span.prompt_tokens else [])
            for blocks, half in rows:
                for first in range(begin, end, tile):
                    items.append([first, min(tile, end - first), len(tables), half])
                tables.append(blocks + [0] * (width - len(blocks)))
            begin = end
        return items, tables


def _passes(spans: Sequence[Span], most: int) -> Iterator[list[Piece]]:
    """Yields the pieces of each pass, of so many tokens together at most."""
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
