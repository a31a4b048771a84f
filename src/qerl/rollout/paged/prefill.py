"""Prefill of prompts, appended tokens and evicted sequences, in passes of bounded length.

All spans are laid end to end and cut into passes, so short prompts share a pass and a long one takes several.
Within a pass every layer first writes all keys and values, then attends, which is why a span may continue in
the next pass, or read a prompt computed in the same one. A state belongs to one sequence: if layers carry
states, prompts are run first, then their states are copied, then the sequences that start from the copies
are run.

A pass is built for a number of tokens, and its inputs have fixed places on the GPU, with room for a bounded
number of pieces. The host needs longer to launch the kernels of a short pass than the GPU to run them, and
short passes are many: prompts of new groups while others decode, tokens that agents append. So those are
captured like decode steps, and kept while the model trains. A long pass takes the GPU longer than the host;
it is launched kernel by kernel, and its buffers are freed for training. So is every pass of a model whose
layers carry states, because its shapes depend on the spans.
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
from qerl.rollout.paged.delta_net import Runs
from qerl.rollout.paged.forward import Forward, Inputs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import CAPTURED_TOKENS
from qerl.rollout.paged.machine import Graphs, Machine
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
        table_width: Maximum cache blocks of a sequence, and of a prompt.
        graphs: Captures the pass.

    Attributes:
        forward: The pass over the decoder.
        captured: Whether the pass is captured, when it is first run, and then replayed.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, tokens: int, table_width: int, graphs: Graphs
    ) -> None:
        device, kinds = decoder.embedding_VD.device, kinds_of(decoder.sizes)
        cuts = [attention.Cut(attention.prefill_rows(kind.group, kind.head_size), 1) for kind in kinds]
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self._pools = cache.geometry.pools
        self.forward = Forward(decoder, tokens, [(cut, cut) for cut in cuts])
        self.captured = tokens <= CAPTURED_TOKENS and "state" not in self._pools
        self._replay: Callable[[], None] | None = None
        self._together = [cut.rows // kind.group for cut, kind in zip(cuts, kinds, strict=True)]
        most = most_pieces(tokens)
        # A piece is read by items at its own keys and as many at its prompt. Tables are last: odd widths
        # would leave what follows unaligned.
        self._shapes = [
            (5, tokens),
            *((2 * (most + triton.cdiv(tokens, each)), 4) for each in self._together),
            *[(2 * most, table_width)] * len(self._pools),
        ]
        self._on_device = torch.zeros(sum(map(math.prod, self._shapes)), dtype=torch.int32, device=device)
        columns, *others = self._parts(self._on_device)
        order = torch.arange(tokens, dtype=torch.int32, device=device)
        self._inputs = Inputs(
            columns[0], columns[1], columns[2:4], columns[4], others[len(kinds) :],
            [(item_4, order) for item_4 in others[: len(kinds)]],
        )  # fmt: skip

    def run(self, pieces: Sequence[Piece]) -> None:
        """Compute the pieces, which are at most `most_pieces`, of at most the pass's tokens together."""
        upload(self._written(pieces), self._on_device.device, to=self._on_device)
        self._inputs.runs = self._runs(pieces) if "state" in self._pools else None
        if not self.captured:
            self._compute()
            return
        if self._replay is None:
            self._replay = self._graphs.capture(self._compute, self._on_device.device)
        self._replay()

    def _compute(self) -> None:
        self.forward.forget_attention()
        self.forward(self._cache, self._inputs)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the columns of tokens, the items of each kind of attention and the tables of each pool."""
        parts = flat.split([*map(math.prod, self._shapes)])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _written(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return the inputs of these pieces on the CPU, laid end to end."""
        flat = torch.zeros(self._on_device.shape, dtype=torch.int32)
        columns, *others = (part.numpy() for part in self._parts(flat))
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
        for item_4, together in zip(others, self._together, strict=False):
            found = _items(pieces, together)
            item_4[: len(found)] = found
        for pool, tables_GB in enumerate(others[len(self._together) :]):
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
            self._on_device.device,
        )


class Prefill:
    """Prefill passes over spans.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        cache: The KV cache.
        machine: The machine on which passes are captured.
        pass_tokens: Token counts that passes are built for, ascending.

    Attributes:
        passes: Passes by token count.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, machine: Machine, pass_tokens: tuple[int, ...]
    ) -> None:
        self._decoder, self._cache, self._machine = decoder, cache, machine
        self._pass_tokens, self._table_width = pass_tokens, 0
        self.forget()

    def forget(self) -> None:
        """Drop all passes, with their buffers and graph memory; the next spans make new ones."""
        self.passes: dict[int, Pass] = {}
        self._graphs = self._machine.graphs()

    def free(self) -> None:
        """Drop the passes that are not captured, whose buffers are the largest."""
        self.passes = {tokens: each for tokens, each in self.passes.items() if each.captured}

    def make_room(self, table_width: int) -> None:
        """Make passes built from now on large enough for tables of this many blocks."""
        self._table_width = max(self._table_width, table_width)

    def run(self, spans: Sequence[Span]) -> None:
        """Compute every span, in order; a span may see what spans before it wrote."""
        for pieces in _passes(spans, self._pass_tokens[-1]):
            self._pass_of(pieces).run(pieces)

    def _pass_of(self, pieces: Sequence[Piece]) -> Pass:
        """Return or make the smallest pass that has room for these pieces."""
        tokens = sum(piece.stop - piece.start for piece in pieces)
        size = next(size for size in self._pass_tokens if size >= tokens and most_pieces(size) >= len(pieces))
        if size not in self.passes:
            self.passes[size] = Pass(self._decoder, self._cache, size, self._table_width, self._graphs)
        return self.passes[size]


def most_pieces(tokens: int) -> int:
    """Return the maximum pieces of a pass of so many tokens.

    The attention kernel's grid has places for all of their work items, of which it skips the unused ones.
    """
    return max(1, tokens // 8)


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


def _passes(spans: Sequence[Span], most: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each pass, at most ``most`` tokens and `most_pieces` per pass."""
    pieces: list[Piece] = []
    room = most
    for span in spans:
        start = 0
        while start < len(span.token_ids):
            stop = min(len(span.token_ids), start + room)
            pieces.append(Piece(span, start, stop))
            room -= stop - start
            start = stop
            if not room or len(pieces) == most_pieces(most):
                yield pieces
                pieces, room = [], most
    if pieces:
        yield pieces
