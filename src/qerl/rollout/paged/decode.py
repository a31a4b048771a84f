"""A decode step of a fixed number of rows, captured once and replayed.

Everything a step needs is on the GPU and is advanced there by the kernel that draws (see rows), so replaying
the graph n times decodes n tokens without the host.
"""

from collections import abc
from collections.abc import Callable

import torch
import triton

from qerl.kernels.decode import attend as attention
from qerl.kernels.decode.draw import BLOCK_V
from qerl.kernels.decode.speculate import propose, settle
from qerl.kernels.device import multiprocessors
from qerl.kernels.limits import PAGE
from qerl.kernels.tensors import product
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.draw import Draw
from qerl.rollout.paged.forward import Forward
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.lanes import learn
from qerl.rollout.paged.machine import Graphs
from qerl.rollout.paged.rows import Rows
from qerl.rollout.paged.weights import Decoder
from qerl.rollout.sequence import Sequence

LONG, FEW = 64, 8
"""Pages of a table from which on few rows, at most these many, take twice the splits that fill the GPU."""


def attention_splits(rows: int, kv_heads: int, multiprocessors: int, pages: int) -> int:
    """Into how many splits the keys of an attention item are divided, so that few rows still fill the GPU.

    It is a power of two up to 8, and no more than a table has pages: a split without a page has nothing to
    read, and its part of the result is combined like the others. Twice as many as fill the GPU cost more to
    combine than they gain, but behind long contexts. 7B on an H200 (attention-splits-7b-h200.json): one row
    behind 256 tokens is 2.9 % faster with 4 splits than with 8, eight rows behind 4096 tokens are 11 % faster
    with 8 than with 4, behind 1024 tokens 1 % slower.

    Args:
        rows: Tokens of the step.
        kv_heads: Heads of keys.
        multiprocessors: Of the GPU.
        pages: Cache blocks of the longest table.
    """
    filling = multiprocessors // (rows * kv_heads)
    wanted = max(1, min(2 * filling if pages >= LONG and rows <= FEW else filling, pages))
    return min(8, 1 << (wanted.bit_length() - 1))


class DecodeStep:
    """The captured step.

    Args:
        decoder: The weights; LoRA is applied where they have it.
        cache: Keys and values.
        rows: Sequences that run side by side.
        max_new: Tokens that a sequence may generate.
        table_width: Cache blocks that a sequence may own, and a prompt too.
        params: Temperature, filters and stop tokens; seed, max_tokens and stops play no part.
        graphs: Where the step is captured.
        drafted: Tokens of a draft at most, which are computed in the same step; 0 for none.
        present: Rows of another step that differs in ``params`` alone, which this one then shares.

    Attributes:
        rows: The batch.
        forward: The pass over the decoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: int,
        max_new: int,
        table_width: int,
        params: SamplingParams,
        graphs: Graphs,
        drafted: int = 0,
        present: Rows | None = None,
    ) -> None:
        device, mixer = decoder.embedding_VD.device, decoder.sizes.spec.mixer
        tokens = rows * (drafted + 1)
        splits = attention_splits(tokens, mixer.kv_heads, multiprocessors(device), table_width)
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self.forward = Forward(decoder, tokens, splits, attention.decode_rows(mixer.group))
        tile = self.forward.tile // mixer.group
        self.rows = present or Rows(rows, max_new, table_width, tile, device, drafted)
        blocks = triton.cdiv(decoder.head_VD.shape[0], BLOCK_V)
        self._draw = Draw(
            params,
            decoder.sizes.hidden,
            decoder.eps,
            stop_K=torch.tensor(list(params.stop_token_ids), dtype=torch.int32, device=device),
            stats_3TB=torch.empty(3, tokens, blocks, device=device),
        )
        self._replay: Callable[[], None] | None = None

    def attend(self, running: abc.Mapping[int, Sequence], session: abc.Iterable[Sequence] = ()) -> None:
        """Write what the attention of everything that runs reads (`Rows.attend`), and where its drafts are
        looked for (`learn`)."""
        self.rows.attend(running)
        if self.rows.lanes is not None:
            learn(self.rows.lanes, running, session)
        self.forward.lse_ZTH.fill_(-torch.inf)  # of rows and halves that no item covers

    def decode(self, steps: int) -> None:
        """Decode so many tokens of every row that has not ended."""
        replay = self._replay or self.capture()
        for _ in range(steps):
            replay()

    def run(self) -> None:
        """Decode one token, and those of its draft, as a captured step does, without a graph."""
        state, lanes = self.rows.state, self.rows.lanes
        if lanes is not None:
            propose(state, lanes, page=PAGE)
        u_TD = self.forward(self._cache, self.rows.inputs)
        logits_TV = product(u_TD, self._decoder.head_VD.T)
        self._draw(logits_TV, self.forward.squares_PT, state if lanes is None else lanes.tokens)
        if lanes is not None:
            settle(state, lanes, page=PAGE)

    def capture(self) -> Callable[[], None]:
        """Record the step, which `decode` otherwise does when it is first called."""
        # Warming up must compile every kernel but change nothing: with all rows ended it does not.
        state = self.rows.state
        done_T, slot_T = state.done_T.clone(), state.slot_T.clone()
        self.rows.clear()
        try:
            self._replay = self._graphs.capture(self.run, done_T.device)
        finally:
            state.done_T.copy_(done_T)
            state.slot_T.copy_(slot_T)
        return self._replay
