"""A decode step of a fixed number of rows, captured as a CUDA graph.

A row is a place for one sequence. Everything a step needs (token, position, where its key goes, how far it
sees) is on the GPU and is advanced there by the sampling kernel, so replaying the graph n times decodes n
tokens without the host. The host looks at ``done`` now and then.
"""

import functools
from typing import Any

import torch

from qerl.kernels.decode import attend as attention
from qerl.kernels.decode import sample
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.limits import SORTED_AT_ONCE
from qerl.rollout.paged.step import Cache, Inputs, Step
from qerl.rollout.paged.weights import Decoder
from qerl.rollout.sampling import truncate

_NEVER = -1e30  # log-probability of what a filter left out
_SLOTS = 132  # multiprocessors of an H100: twice as many pieces cost more in the merge than they gave


def attention_splits(rows: int, kv_heads: int) -> int:
    """Pieces an attention item is cut into, so that few rows still fill the GPU; a power of two up to 8."""
    wanted = max(1, _SLOTS // (rows * kv_heads))
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
        state: Tensors by name, see :func:`qerl.kernels.decode.sample.sample`.
        tables: int32 [2 * rows, table_width], prompts of groups first, then each row's own blocks.
        items, order: Attention items, see :func:`qerl.kernels.decode.attend.attend`.
        uniform: fp32 [rows, most].
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
        splits = attention_splits(rows, decoder.kv_heads)
        group = decoder.heads // decoder.kv_heads
        self.step = Step(decoder, rows, splits, attention.decode_rows(group), lora)
        self.tile_tokens = self.step.tile // group

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tables = integers(2 * rows, table_width)
        self.items = integers(2 * rows, 4)
        self.order = integers(2 * rows)
        self.uniform = torch.zeros(rows, most, device=device)
        self.stop = torch.tensor(list(params.stop_token_ids), dtype=torch.int32, device=device)
        self.state = {
            name: integers(rows) for name in ("token", "position", "slot", "generated", "max_new", "done")
        }
        self.clear()
        self.state["limit"] = integers(2, rows)
        self.state["own_table"] = self.tables[rows:]
        self.state["out_token"] = integers(rows, most)
        self.state["out_stats"] = torch.zeros(2, rows, most, device=device)
        vocabulary = decoder.head_VD.shape[0]
        self.stats = torch.empty(3, rows, -(-vocabulary // sample.BLOCK_V), device=device)
        self.inputs = Inputs(
            self.state["token"], self.state["position"], self.state["slot"], self.state["limit"], self.tables,
            self.items, self.order,
        )  # fmt: skip
        self._graph: torch.cuda.CUDAGraph | None = None

    def clear(self) -> None:
        """Ends every row."""
        self.state["done"].fill_(1)
        self.state["slot"].fill_(-1)

    def take_over(self, other: "DecodeStep", rows: dict[int, int]) -> None:
        """Continues sequences of another step of the same model.

        Args:
            other: Where they ran.
            rows: Their rows there, and here.
        """
        device = self.uniform.device
        there, here = (torch.tensor(list(side), device=device) for side in (rows.keys(), rows.values()))
        of_rows = [name for name in self.state if name not in ("own_table", "limit", "out_stats")]
        pairs = [(self.state[name], other.state[name], 0) for name in of_rows]
        pairs += [(self.state[name], other.state[name], 1) for name in ("limit", "out_stats")]
        for mine, theirs, dim in [*pairs, (self.uniform, other.uniform, 0)]:
            mine.index_copy_(dim, here, theirs.index_select(dim, there))

    def _run(self) -> None:
        u_TD = self.step(self.cache, self.inputs)
        logits_TV = torch.mm(u_TD, self.decoder.head_VD.T, out_dtype=torch.float32)
        if self._params.filtered:
            self._draw_filtered(logits_TV)
            return
        sample.sample(
            logits_TV, self.step.squares_PT, self.stats, self.uniform, self.stop, self.state,
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
        sample.sample(
            logits_TV, torch.ones_like(mean_square_T)[None], self.stats, self.uniform, self.stop, self.state,
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
        done = self.state["done"].clone()
        slot = self.state["slot"].clone()
        self.clear()
        try:
            stream = _capture_stream(self.uniform.device)
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
            self.state["done"].copy_(done)
            self.state["slot"].copy_(slot)
