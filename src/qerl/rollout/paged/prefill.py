"""Keys and values of prompts, of what others wrote, and of what was given up, in passes of bounded length.

All spans that have something to compute are laid end to end and cut into passes, so short prompts share a
pass and a long one takes several. Within a pass every layer first writes all keys and values, then attends,
which is why a span may continue in the next pass, or read a prompt computed in the same one.
"""

from collections.abc import Sequence

import torch

from qerl.kernels.decode import attend as attention
from qerl.kernels.limits import PAGE
from qerl.rollout.paged.forward import Forward, Inputs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.scheduler import Span
from qerl.rollout.paged.weights import Decoder


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
        tokens = [(span, i) for span in spans for i in range(len(span.token_ids))]
        for start in range(0, len(tokens), self._pass_tokens[-1]):
            self._run_pass(tokens[start : start + self._pass_tokens[-1]], cache)

    def _run_pass(self, tokens: list[tuple[Span, int]], cache: KVCache) -> None:
        size = next(size for size in self._pass_tokens if size >= len(tokens))
        if size not in self.passes:
            self.passes[size] = Forward(self._decoder, size, splits=1, tile=attention.PREFILL_ROWS)
        forward = self.passes[size]
        padding = size - len(tokens)
        columns: list[list[int]] = [[], [], [], [], []]
        for span, i in tokens:
            place = span.start + i
            slot = span.blocks[place // PAGE] * PAGE + place % PAGE
            row = (span.token_ids[i], span.position + i, slot, span.prompt_tokens, place + 1)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        token, position, slots, shared, own = (column + [0] * padding for column in columns)
        slots[len(tokens) :] = [-1] * padding
        items, tables = self._items([span for span, _ in tokens])
        device = self._decoder.embedding_VD.device

        def upload(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        inputs = Inputs(
            upload(token), upload(position), upload(slots), upload([shared, own]), upload(tables),
            upload(items), torch.arange(size, dtype=torch.int32, device=device),
        )  # fmt: skip
        forward.lse_ZTH.fill_(-torch.inf)
        forward(cache, inputs)

    def _items(self, owners: list[Span]) -> tuple[list[list[int]], list[list[int]]]:
        """Attention items and block tables of a pass: each span at its own keys, and at its prompt if it has
        one."""
        tile = attention.PREFILL_ROWS // self._decoder.sizes.group
        width = max(max(len(span.blocks), len(span.prompt_blocks)) for span in owners)
        items: list[list[int]] = []
        tables: list[list[int]] = []
        start = 0
        while start < len(owners):
            span = owners[start]
            end = start
            while end < len(owners) and owners[end] is span:
                end += 1
            rows = [(span.blocks, 1)] + ([(span.prompt_blocks, 0)] if span.prompt_tokens else [])
            for blocks, half in rows:
                for first in range(start, end, tile):
                    items.append([first, min(tile, end - first), len(tables), half])
                tables.append(blocks + [0] * (width - len(blocks)))
            start = end
        return items, tables
