"""Keys and values of a wave in buffers that are allocated once.

transformers' DynamicCache concatenates the whole cache with every new token in every layer: for 64 sequences
of 100 tokens in a 30-layer model 0.4 GB are copied for each token. Its StaticCache does not copy, but makes
attention read the unused end as well. Here a layer owns [B, H, capacity, D] buffers, writes the new token in
place, and returns views of the part in use.

A wave goes through two phases. Prefill stores the keys and values of the unique prompts as they come.
``repeat`` then gives each sample its own row and room for its completion; from there on tokens are written in
place, and ``keep`` drops finished rows by moving rows from the end into the holes. A row's keys can be taken
out, and later be loaded into the cache of another batch, or join a batch that decodes.

All rows end at the same column: what is shorter has unused columns on its left, which are zero or padding, so
that a key that the mask hides is at least a finite one.

Sliding-window layers keep every position as well: the model's own mask hides those outside the window, which
is correct with left padding and costs memory, not correctness. Given up: sharing the prompt's pages between
samples, and memory for completions that end early; both need a paged cache.

Shapes: P prompts, B rows (samples that still run), H key/value heads, T tokens so far, D head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one row and layer, each [H, T, D]."""


def _right_aligned(states: Sequence[torch.Tensor], capacity: int) -> torch.Tensor:
    """A buffer [B, H, capacity, D] with states [H, T, D] that all end where the longest ends.

    What is in front of a shorter one is zero, what is behind is not initialised.
    """
    heads, _, width = states[0].shape
    longest = max(state.shape[1] for state in states)
    buffer = states[0].new_empty(len(states), heads, capacity, width)
    for row, state in enumerate(states):
        buffer[row, :, : longest - state.shape[1]] = 0
        buffer[row, :, longest - state.shape[1] : longest] = state
    return buffer


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one attention layer; ``keys`` and ``values`` are the buffers, their end unused."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Keep the prompts' keys and values, each [P, H, T, D], as they are."""
        self.keys, self.values = key_states, value_states
        self._length = key_states.shape[2]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, H, new, D] and return views of all so far, each [B, H, T, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        start, self._length = self._length, self._length + key_states.shape[2]
        self.keys[:, :, start : self._length] = key_states
        self.values[:, :, start : self._length] = value_states
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def repeat(self, rows: torch.Tensor, capacity: int) -> None:
        """Give each row of the batch a copy of prompt ``rows[row]`` and room for ``capacity`` tokens."""
        self.keys = self._expanded(self.keys, rows, capacity)
        self.values = self._expanded(self.values, rows, capacity)

    def _expanded(self, states: torch.Tensor, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        _, heads, _, width = states.shape
        buffer = states.new_empty(len(rows), heads, capacity, width)
        buffer[:, :, : self._length] = states[rows]
        return buffer

    def keep(self, moves: torch.Tensor, holes: torch.Tensor, rows: int) -> None:
        """Copy rows ``moves`` over rows ``holes`` and shorten the batch to ``rows``."""
        for buffer in (self.keys, self.values):
            used = buffer[:, :, : self._length]
            used[holes] = used[moves]
        self.keys, self.values = self.keys[:rows], self.values[:rows]

    def align(self, ends: Sequence[int], lengths: Sequence[int]) -> None:
        """Let rows of so many tokens, which end in front of column ``ends[row]``, end where the longest does
        if it begins at the first column; what was behind is given up."""
        self._length = max(lengths)
        for row, (end, tokens) in enumerate(zip(ends, lengths, strict=True)):
            if end != self._length:
                for buffer in (self.keys, self.values):
                    moved = buffer[row, :, end - tokens : end].clone()
                    buffer[row, :, self._length - tokens : self._length] = moved

    def take(self, row: int, tokens: int) -> KeysAndValues:
        """Copies [H, tokens, D] of a row's last tokens."""
        last = slice(self._length - tokens, self._length)
        return self.keys[row, :, last].clone(), self.values[row, :, last].clone()

    def load(self, rows: Sequence[KeysAndValues], lengths: Sequence[int], capacity: int) -> None:
        """Begin with so many first tokens of what was taken of each row, and room for ``capacity`` tokens."""
        self.keys, self.values = (
            _right_aligned([each[kind][:, :n] for each, n in zip(rows, lengths, strict=True)], capacity)
            for kind in (0, 1)
        )
        self._length = max(lengths)
        self.is_initialized = True

    def join(self, other: "PreallocatedLayer", width: int, capacity: int) -> None:
        """Append the rows of another batch; of both the last ``width`` tokens are kept."""
        self.keys, self.values = (
            _right_aligned(
                [
                    *mine[:, :, : self._length][..., -width:, :],
                    *theirs[:, :, : other._length][..., -width:, :],
                ],
                capacity,
            )
            for mine, theirs in ((self.keys, other.keys), (self.values, other.values))
        )
        self._length = width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that ``query_length`` new tokens see, themselves included, and the position of the first."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far, left padding included."""
        return self._length

    def get_max_length(self) -> int:
        """No limit of its own (-1): the engine allocates what a wave can need."""
        return -1


class PreallocatedCache(Cache):
    """One ``PreallocatedLayer`` for each layer of the model.

    Args:
        layers: Decoder layers of the model.
    """

    def __init__(self, layers: int) -> None:
        self._own_layers = [PreallocatedLayer() for _ in range(layers)]
        super().__init__(layers=list(self._own_layers))

    def repeat(self, rows: torch.Tensor, capacity: int) -> None:
        """Turn the prompts' cache into the batch's.

        Args:
            rows: int64 [B], the prompt of each row.
            capacity: Tokens, padding included, that a row can grow to.
        """
        for layer in self._own_layers:
            layer.repeat(rows, capacity)

    def keep(self, sources: Sequence[int]) -> None:
        """Drop rows.

        Args:
            sources: For each row that remains the row it was before; only rows that differ are copied. A row
                must not come from one in front of it.
        """
        holes = [row for row, source in enumerate(sources) if row != source]
        device = self._own_layers[0].keys.device
        holes_index = torch.tensor(holes, device=device, dtype=torch.long)
        moves_index = torch.tensor([sources[row] for row in holes], device=device, dtype=torch.long)
        for layer in self._own_layers:
            layer.keep(moves_index, holes_index, len(sources))

    def align(self, ends: Sequence[int], lengths: Sequence[int]) -> None:
        """Let all rows end at the same column again, the longest one with its beginning at the first.

        Args:
            ends: The column behind the last token of each row.
            lengths: Tokens of each row.
        """
        for layer in self._own_layers:
            layer.align(ends, lengths)

    def take(self, row: int, tokens: int) -> list[KeysAndValues]:
        """Copies of keys and values of a row's last tokens, layer by layer."""
        return [layer.take(row, tokens) for layer in self._own_layers]

    def load(self, rows: Sequence[Sequence[KeysAndValues]], lengths: Sequence[int], capacity: int) -> None:
        """Begin with what was taken of rows.

        Args:
            rows: What `take` returned of each.
            lengths: How many of its first tokens each begins with, one of them at least with one.
            capacity: Tokens, padding included, that a row can grow to.
        """
        for number, layer in enumerate(self._own_layers):
            layer.load([row[number] for row in rows], lengths, capacity)

    def join(self, other: "PreallocatedCache", width: int, capacity: int) -> None:
        """Append the rows of another batch.

        Args:
            other: Its cache.
            width: Tokens of the longest row of both.
            capacity: Tokens, padding included, that a row can grow to.
        """
        for mine, theirs in zip(self._own_layers, other._own_layers, strict=True):
            mine.join(theirs, width, capacity)
