"""A decode step of a fixed number of rows, captured as a CUDA graph.

A row is a place for one sequence. Everything a step needs (token, position, where its key goes, how far it
sees) is on the GPU and is advanced there by the sampling kernel, so replaying the graph n times decodes n
tokens without the host. The host looks at ``done`` now and then.
"""

import dataclasses
import functools
from typing import Any

import torch
import triton

from qerl.kernels.decode import attend as attention
from qerl.kernels.decode import draw
from qerl.kernels.decode.draw import RowState
from qerl.kernels.device import multiprocessors
from qerl.kernels.limits import PAGE
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.forward import Cache, Forward, Inputs
from qerl.rollout.paged.limits import SORTED_AT_ONCE
from qerl.rollout.paged.weights import Decoder
from qerl.rollout.sampling import truncate

_BY_KIND = ("limit_2T", "out_stats_2TM")  # whose rows are the second dimension
_NEVER = -1e30  # log-probability of what a filter left out


def attention_splits(rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Splits of an attention item, with which few rows still fill the GPU; a power of two up to 8.

    Twice as many cost more in their combination than they gave (H100).
    """
    wanted = max(1, multiprocessors // (rows * kv_heads))
    return min(8, 1 << (wanted.bit_length() - 1))


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps of one GPU are captured; torch's own is of the GPU that captured first."""
    return torch.cuda.Stream(device)


class DecodeStep:
    """The captured step.

    Args:
        decoder: The weights.
        cache: Keys and values.
        rows: Sequences that run side by side.
        most: Tokens a sequence may generate.
        table_width: Cache blocks a sequence may own, and a prompt too.
        params: Temperature, filters and stop tokens; seed and max_tokens play no part.
        lora: Whether the adapter is applied.
        pool: Graph memory to share with other steps, none of which runs at the same time.

    Attributes:
        state: What the drawing kernel advances, by row.
        tables: int32 [2 * rows, table_width], prompts of groups first, then each row's own blocks.
        items, order: Attention items, see :func:`qerl.kernels.decode.attend.attend`.
        tile_tokens: Most tokens of an attention item.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        rows: int,
        most: int,
        table_width: int,
        params: SamplingParams,
        lora: bool,
        pool: Any = None,
    ) -> None:
        device = decoder.embedding_VD.device
        self.decoder, self.cache, self.rows, self._params, self._pool = decoder, cache, rows, params, pool
        splits = attention_splits(rows, decoder.kv_heads, multiprocessors(device))
        group = decoder.heads // decoder.kv_heads
        self.step = Forward(decoder, rows, splits, attention.decode_rows(group), lora)
        self.tile_tokens = self.step.tile // group

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tables = integers(2 * rows, table_width)
        self.items = integers(2 * rows, 4)
        self.order = integers(2 * rows)
        self.stop = torch.tensor(list(params.stop_token_ids), dtype=torch.int32, device=device)
        self.state = RowState(
            token_T=integers(rows),
            position_T=integers(rows),
            slot_T=integers(rows),
            limit_2T=integers(2, rows),
            own_table_TB=self.tables[rows:],
            generated_T=integers(rows),
            max_new_T=integers(rows),
            done_T=integers(rows),
            uniform_TM=torch.zeros(rows, most, device=device),
            out_token_TM=integers(rows, most),
            out_stats_2TM=torch.zeros(2, rows, most, device=device),
        )
        self.clear()
        vocabulary = decoder.head_VD.shape[0]
        self.stats = torch.empty(3, rows, triton.cdiv(vocabulary, draw.BLOCK_V), device=device)
        self.inputs = Inputs(
            self.state.token_T, self.state.position_T, self.state.slot_T, self.state.limit_2T, self.tables,
            self.items, self.order,
        )  # fmt: skip
        self._graph: torch.cuda.CUDAGraph | None = None

    def clear(self) -> None:
        """Ends every row."""
        self.state.done_T.fill_(1)
        self.state.slot_T.fill_(-1)

    def take_over(self, other: "DecodeStep", rows: dict[int, int]) -> None:
        """Continues sequences of another step of the same model.

        Args:
            other: Where they ran.
            rows: Their rows there, and here.
        """
        device = self.state.done_T.device
        there, here = (torch.tensor(list(side), device=device) for side in (rows.keys(), rows.values()))
        for field in dataclasses.fields(RowState):
            if field.name != "own_table_TB":  # of which the next tables are written
                mine, theirs = getattr(self.state, field.name), getattr(other.state, field.name)
                dim = int(field.name in _BY_KIND)
                mine.index_copy_(dim, here, theirs.index_select(dim, there))

    def _run(self) -> None:
        u_TD = self.step(self.cache, self.inputs)
        logits_TV = torch.mm(u_TD, self.decoder.head_VD.T, out_dtype=torch.float32)
        if self._params.filtered:
            self._draw_filtered(logits_TV)
            return
        draw.draw_token(
            logits_TV, self.step.squares_PT, self.stats, self.stop, self.state, page=PAGE,
            width=self.decoder.hidden, eps=self.decoder.eps, temperature=self._params.temperature,
        )  # fmt: skip

    def _draw_filtered(self, logits_TV: torch.Tensor) -> None:
        """Top-k, top-p and min-p: torch sorts the vocabulary, the kernel draws from what is left.

        A few rows at a time, in place: the whole of 512 x 152,064 logits would want 3 GB besides.
        """
        mean_square_T = self.step.squares_PT.sum(0) / self.decoder.hidden
        scale_T1 = (torch.rsqrt(mean_square_T + self.decoder.eps) / self._params.temperature)[:, None]
        entropy_T = torch.empty_like(mean_square_T)
        rows = max(1, SORTED_AT_ONCE // logits_TV.shape[1])
        for first in range(0, len(logits_TV), rows):
            part = slice(first, first + rows)
            full_TV = torch.log_softmax(logits_TV[part] * scale_T1[part], dim=-1)
            entropy_T[part] = -torch.linalg.vecdot(full_TV.exp(), full_TV)
            # Not -inf, which times a probability of zero would be NaN; NaN stays, and ends its sequence.
            left_TV = truncate(full_TV, self._params)
            logits_TV[part] = torch.where(left_TV == -torch.inf, _NEVER, left_TV)
        draw.draw_token(
            logits_TV, torch.ones_like(mean_square_T)[None], self.stats, self.stop, self.state, page=PAGE,
            width=1, eps=0.0, temperature=1.0, entropy_T=entropy_T,
        )  # fmt: skip

    def replay(self) -> None:
        """Decodes one token of every row that has not ended."""
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()

    def _capture(self) -> None:
        # Warming up must compile every kernel but change nothing: with all rows ended it does not.
        done_T, slot_T = self.state.done_T.clone(), self.state.slot_T.clone()
        self.clear()
        try:
            stream = _capture_stream(done_T.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may call CUDA meanwhile: NCCL's watchdog asks for events.
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                self._run()
            self._graph = graph
        finally:
            self.state.done_T.copy_(done_T)
            self.state.slot_T.copy_(slot_T)
