"""Keys and values of prompts, and of a preempted sequence's own tokens, in pieces of a bounded number of
tokens.

All sequences that have something to compute are laid end to end and cut into chunks, so short prompts share a
pass and a long one takes several. Within a pass every layer first writes all keys and values, then attends,
which is why a sequence may continue in the next chunk, or read a prompt computed in the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qerl.kernels.decode import attend as attention
from qerl.kernels.limits import PAGE
from qerl.rollout.paged.forward import Cache, Forward, Inputs
from qerl.rollout.paged.weights import Decoder

_SIZES = (64, 512, 2048)


@dataclass(frozen=True)
class Job:
    """Tokens to compute.

    Attributes:
        token_ids: The tokens.
        position: Of the first token.
        blocks: Where keys and values go, from offset 0 of the first block on.
        prompt_blocks: Blocks of a prompt that all of them see in full, for a sequence's own tokens.
        prompt_tokens: Tokens in those.
    """

    token_ids: list[int]
    position: int
    blocks: list[int]
    prompt_blocks: list[int]
    prompt_tokens: int


class Prefill:
    """Runs jobs through the decoder.

    Args:
        decoder: The weights.
        lora: Whether the adapter is applied.
    """

    def __init__(self, decoder: Decoder, lora: bool) -> None:
        self._decoder, self._lora = decoder, lora
        self._steps: dict[int, Forward] = {}

    def clear(self) -> None:
        """See `Forward.clear`."""
        for step in self._steps.values():
            step.clear()

    def run(self, jobs: Sequence[Job], cache: Cache) -> None:
        """Computes every job, in order; a job may see what jobs before it wrote."""
        pieces = [(job, i) for job in jobs for i in range(len(job.token_ids))]
        for start in range(0, len(pieces), _SIZES[-1]):
            self._pass(pieces[start : start + _SIZES[-1]], cache)

    def _pass(self, pieces: list[tuple[Job, int]], cache: Cache) -> None:
        size = next(s for s in _SIZES if s >= len(pieces))
        if size not in self._steps:
            self._steps[size] = Forward(
                self._decoder, size, splits=1, tile=attention.PREFILL_ROWS, lora=self._lora
            )
        step = self._steps[size]
        pad = size - len(pieces)
        columns: list[list[int]] = [[], [], [], [], []]
        for job, i in pieces:
            slot = job.blocks[i // PAGE] * PAGE + i % PAGE
            row = (job.token_ids[i], job.position + i, slot, job.prompt_tokens, i + 1)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        token, position, slots, shared, own = (column + [0] * pad for column in columns)
        slots[len(pieces) :] = [-1] * pad
        items, tables = self._items([job for job, _ in pieces])
        device = self._decoder.embedding_VD.device

        def upload(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        inputs = Inputs(
            upload(token), upload(position), upload(slots), upload([shared, own]), upload(tables),
            upload(items),
            torch.arange(size, dtype=torch.int32, device=device),
        )  # fmt: skip
        step.lse_ZTH.fill_(-torch.inf)
        step(cache, inputs)

    def _items(self, owners: list[Job]) -> tuple[list[list[int]], list[list[int]]]:
        """Attention items of a pass, at its own keys for every job and at the prompt where there is one."""
        tile = attention.PREFILL_ROWS // (self._decoder.heads // self._decoder.kv_heads)
        width = max(max(len(job.blocks), len(job.prompt_blocks)) for job in owners)
        items: list[list[int]] = []
        tables: list[list[int]] = []
        start = 0
        while start < len(owners):
            job = owners[start]
            end = start
            while end < len(owners) and owners[end] is job:
                end += 1
            rows = [(job.blocks, 1)] + ([(job.prompt_blocks, 0)] if job.prompt_tokens else [])
            for blocks, half in rows:
                for first in range(start, end, tile):
                    items.append([first, min(tile, end - first), len(tables), half])
                tables.append(blocks + [0] * (width - len(blocks)))
            start = end
        return items, tables
