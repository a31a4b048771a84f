"""The model call: token ids in, logits of the last position out.

One ``Runner`` serves one wave. It pads the prompts on the left so that all rows append at the same index of
the cache, runs each prompt once, gives each sample a copy of its prompt's cache, and then feeds one token per
row and step. Rows with kept keys and values are prefilled from where these end, and may join a wave that is
already decoding.

The common prefix of all prompts of a wave, such as a system prompt or worked examples, is computed once, and
only the rest per prompt: of 64 problems with one worked example, 92 tokens each, 70 tokens are the same.

Attention of one new token does not copy the cache (`grouped_decode`). With a padding mask, transformers' sdpa
path repeats every key/value head for each query head that shares it: 3.8 ms per layer for 64 rows x 126
tokens, 9 query over 3 key/value heads, on 2 cores. With a single new token, the query heads that share a
key/value head can be passed as several queries of one head, because they attend to the same keys under the
same mask: 0.9 ms, same numbers.

**Keys and values** are stored in buffers that are allocated once. transformers' DynamicCache concatenates the
whole cache with every new token in every layer: for 64 sequences of 100 tokens in a 30-layer model, 0.4 GB
are copied per token. Its StaticCache does not copy, but makes attention read the unused end as well. Here a
layer owns [B, H, capacity, D] buffers, writes the new token in place, and returns views of the part in use.

A wave goes through two phases. Prefill stores the keys and values of the unique prompts as computed.
``repeat`` then gives each sample its own row with room for its completion; from then on tokens are written in
place, and ``keep`` drops finished rows by moving rows from the end into the holes. A row's keys and values
can be copied out, and later be loaded into the cache of another batch, or join a batch that is decoding.

All rows end at the same column: shorter rows have unused columns on the left, which are zero or padding, so
that masked keys are always finite.

Sliding-window layers keep every position too: the model's own mask hides those outside the window, which is
correct with left padding and costs only memory.

**States.** A gated delta net keeps, per row of any length, the last inputs of its convolution and a state.
Padding before a prompt leaves both zero, since transformers zeroes such a layer's input there. Padding after
tokens would not: the state decays with each. Nor can a state be rewound to an earlier token. So rows of such
models that go on are computed together only if they have equally many new tokens, and common prefixes of
prompts are not shared.

Given up: sharing the prompt's pages between samples, and freeing memory of completions that end early; both
need a paged cache.

Shapes: P prompts, B rows, T tokens of the longest prompt, or cached ones, V vocabulary, H heads (of queries,
or of keys and values), G query heads for each key/value head, D head width, C channels and W taps of a
convolution.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qerl.families.parts import base_model, cache_argument, layers_with_state
from qerl.kernels.tensors import unrounded_logits

OfLayer = tuple[torch.Tensor, torch.Tensor]
"""A layer's cache of a row: keys and values, each [H, T, D], or convolution inputs [C, W] and a state."""


class Kept(NamedTuple):
    """Copy of the cache of one row.

    Attributes:
        tokens: Number of cached tokens.
        layers: Cache of each layer.
    """

    tokens: int
    layers: list[OfLayer]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(one.nbytes + other.nbytes for one, other in self.layers)


def _right_aligned(states: Sequence[torch.Tensor], capacity: int) -> torch.Tensor:
    """Copy states [H, T, D] into a buffer [B, H, capacity, D], all ending at the end of the longest.

    Columns before a shorter state are zero; columns after the end are uninitialised.
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
        """Store the prompts' keys and values, each [P, H, T, D], without copying them."""
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

    def take(self, row: int, tokens: int) -> OfLayer:
        """Return copies [H, tokens, D] of the keys and values of a row's last tokens."""
        last = slice(self._length - tokens, self._length)
        return self.keys[row, :, last].clone(), self.values[row, :, last].clone()

    def load(self, rows: Sequence[OfLayer], lengths: Sequence[int], capacity: int) -> None:
        """Begin with the first ``lengths[row]`` tokens of each row, and room for ``capacity`` tokens."""
        self.keys, self.values = (
            _right_aligned([each[kind][:, :n] for each, n in zip(rows, lengths, strict=True)], capacity)
            for kind in (0, 1)
        )
        self._length = max(lengths)
        self.is_initialized = True

    def join(self, other: "PreallocatedLayer", width: int, capacity: int) -> None:
        """Append the rows of another batch; both batches keep their last ``width`` columns."""
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
        """Return the number of keys, ``query_length`` new ones included, and the index of the first key."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, left padding included."""
        return self._length

    def get_max_length(self) -> int:
        """Return -1, no limit: the engine allocates the maximum that a wave can need."""
        return -1


class StateLayer(LinearAttentionLayer):
    """Cache of a gated delta net: inputs of its convolution [B, C, W] and states [B, heads, ...].

    transformers writes both in place. Their size does not depend on the number of tokens.
    """

    @property
    def _states(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv_states[0], self.recurrent_states[0]

    def _put(self, conv_states: torch.Tensor, states: torch.Tensor) -> None:
        self.conv_states[0], self.recurrent_states[0] = conv_states, states

    def repeat(self, rows: torch.Tensor, capacity: int) -> None:
        """Give each row of the batch a copy of prompt ``rows[row]``."""
        self._put(*(states[rows] for states in self._states))

    def keep(self, moves: torch.Tensor, holes: torch.Tensor, rows: int) -> None:
        """Copy rows ``moves`` over rows ``holes`` and shorten the batch to ``rows``."""
        for states in self._states:
            states[holes] = states[moves]
        self._put(*(states[:rows] for states in self._states))

    def take(self, row: int, tokens: int) -> OfLayer:
        """Return copies of a row's convolution inputs and state after its last token."""
        conv_states, states = self._states
        return conv_states[row].clone(), states[row].clone()

    def load(self, rows: Sequence[OfLayer], lengths: Sequence[int], capacity: int) -> None:
        """Begin with the given rows; a state has no prefix, so ``lengths`` is ignored."""
        conv_states, states = (torch.stack(kind) for kind in zip(*rows, strict=True))
        self.lazy_initialization(conv_states, states)
        self._put(conv_states, states)
        self.has_previous_state[0] = True

    def join(self, other: "StateLayer", width: int, capacity: int) -> None:
        """Append the rows of another batch."""
        self._put(*(torch.cat(both) for both in zip(self._states, other._states, strict=True)))


class PreallocatedCache(Cache):
    """Cache of a model: one ``PreallocatedLayer`` or ``StateLayer`` per layer.

    Args:
        with_state: Whether each layer carries a state.
        device: Device of the model.

    Attributes:
        has_states: Whether any layer carries a state.
    """

    def __init__(self, with_state: Sequence[bool], device: torch.device) -> None:
        self._own_layers = [StateLayer() if each else PreallocatedLayer() for each in with_state]
        self._device, self.has_states = device, any(with_state)
        super().__init__(layers=list(self._own_layers))

    def repeat(self, rows: torch.Tensor, capacity: int) -> None:
        """Turn the cache of the prompts into the cache of the batch.

        Args:
            rows: int64 [B], the prompt of each row.
            capacity: Maximum number of tokens per row, padding included.
        """
        for layer in self._own_layers:
            layer.repeat(rows, capacity)

    def keep(self, sources: Sequence[int]) -> None:
        """Drop rows.

        Args:
            sources: Previous row of each row that remains; only rows that move are copied. A row's source
                must not be before the row.
        """
        holes = [row for row, source in enumerate(sources) if row != source]
        holes_index = torch.tensor(holes, device=self._device, dtype=torch.long)
        moves_index = torch.tensor([sources[row] for row in holes], device=self._device, dtype=torch.long)
        for layer in self._own_layers:
            layer.keep(moves_index, holes_index, len(sources))

    def take(self, row: int, tokens: int) -> Kept:
        """Return copies of all layers' cache of a row of ``tokens`` tokens."""
        return Kept(tokens, [layer.take(row, tokens) for layer in self._own_layers])

    def load(self, rows: Sequence[Kept], lengths: Sequence[int], capacity: int) -> None:
        """Begin with rows that `take` returned.

        Args:
            rows: The result of `take` for each row.
            lengths: Number of first tokens to load per row, at least 1 in one of them; all tokens if a layer
                has a state.
            capacity: Maximum number of tokens per row, padding included.
        """
        for number, layer in enumerate(self._own_layers):
            layer.load([row.layers[number] for row in rows], lengths, capacity)

    def join(self, other: "PreallocatedCache", width: int, capacity: int) -> None:
        """Append the rows of another batch.

        Args:
            other: Cache of the other batch.
            width: Number of tokens of the longest row of both.
            capacity: Maximum number of tokens per row, padding included.
        """
        for mine, theirs in zip(self._own_layers, other._own_layers, strict=True):
            mine.join(theirs, width, capacity)


WORTH_SHARING = 64
"""Minimum number of tokens that a shared prefix must save: an extra model call costs about as much."""


_GROUPED_DECODE = "qerl_grouped_decode"


class Runner:
    """Runs one wave through a transformers causal LM.

    Args:
        model: The model, PEFT-wrapped or not, in eval mode.
        pad_token_id: Pads shorter prompts on the left; masked, so any id works.

    Attributes:
        saved_tokens: Prompt tokens that `prefill` did not compute, because they were kept or shared with
            another prompt.
    """

    _mask: torch.Tensor  # bool [B, columns], with room for future tokens
    _positions: torch.Tensor  # [B, 1], of each row's last token
    _length: int  # columns in use

    def __init__(self, model: nn.Module, pad_token_id: int) -> None:
        self._base = base = base_model(model)
        self.saved_tokens = 0
        self._model = model
        self._pad_token_id = pad_token_id
        self._device = base.device
        self._cache = PreallocatedCache(layers_with_state(base.config), base.device)
        self._cache_argument = cache_argument(model)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        max_tokens: int,
        kept: Sequence[Kept] = (),
    ) -> torch.Tensor:
        """Compute the prompts and set up a row for each sample.

        Args:
            prompts: Token ids of P prompts.
            rows: Prompt index of each of the B rows; every prompt has a row, and first rows are in order.
            max_tokens: Maximum number of tokens that a row is fed afterwards.
            kept: Kept cache of each prompt, as in `resume`; empty if nothing is kept.

        Returns:
            Logits [B, V] of each row's first sampled token, in the model's dtype.
        """
        shared = 0 if self._cache.has_states else _tokens_in_common(prompts)
        if kept:
            self.saved_tokens = sum(each.tokens for each in kept)
            if len(rows) == len(prompts):
                return self.resume(prompts, kept, max_tokens)
            logits_PV = self.resume(prompts, kept, 0)
        elif shared * (len(prompts) - 1) >= WORTH_SHARING:
            self.saved_tokens = shared * (len(prompts) - 1)
            logits_PV = self._prefill_behind(shared, prompts)
        else:
            self.saved_tokens = 0
            logits_PV = self._prefill_whole(prompts)
        rows_B = torch.tensor(rows, device=self._device)
        self._mask = nn.functional.pad(self._mask[rows_B], (0, max_tokens), value=True)
        self._positions = self._positions[rows_B]
        self._cache.repeat(rows_B, self._length + max_tokens)
        return logits_PV[rows_B]

    def _prefill_whole(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits [P, V] after prompts, each computed from its first token."""
        self._length = width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        tokens_PT = torch.tensor(
            [[self._pad_token_id] * pad + list(p) for pad, p in zip(padding, prompts, strict=True)],
            device=self._device,
        )
        padding_P1 = torch.tensor(padding, device=self._device)[:, None]
        columns_T = torch.arange(width, device=self._device)
        self._mask = columns_T >= padding_P1
        positions_PT = (columns_T - padding_P1).clamp_(min=0)
        self._positions = positions_PT[:, -1:]
        return self._forward(tokens_PT, self._mask, positions_PT)

    def _prefill_behind(self, shared: int, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits [P, V] after prompts, whose common first ``shared`` tokens are computed once."""
        beginning = Runner(self._model, self._pad_token_id)
        beginning._prefill_whole([prompts[0][:shared]])
        return self.resume(prompts, [beginning.kept_of(0)] * len(prompts), 0)

    def resume(self, texts: Sequence[Sequence[int]], kept: Sequence[Kept], max_tokens: int) -> torch.Tensor:
        """Compute the tokens of texts that follow their kept cache.

        All rows compute as many of their last tokens as the row with the most to compute. Padding the others
        instead would cost the same, and leave gaps between their keys, which a sliding window would count.

        Args:
            texts: Token ids of B rows.
            kept: Cache of the first tokens of each text, of at least one and of fewer than it has; if a layer
                has a state, all rows must have equally many tokens left.
            max_tokens: Maximum number of tokens that a row is fed afterwards.

        Returns:
            Logits [B, V] of each row's next token, in the model's dtype.
        """
        lengths = [len(text) for text in texts]
        width = max(lengths)
        new = max(n - row.tokens for n, row in zip(lengths, kept, strict=True))
        self._cache.load(kept, [max(0, n - new) for n in lengths], width + max_tokens)
        tokens_BT = torch.tensor(
            [
                [self._pad_token_id] * (new - n) + list(text[-new:])
                for n, text in zip(lengths, texts, strict=True)
            ],
            device=self._device,
        )
        self._place(torch.tensor(lengths, device=self._device)[:, None], max_tokens)
        behind_T = torch.arange(1 - new, 1, device=self._device)
        positions_BT = (self._positions + behind_T).clamp_(min=0)
        return self._forward(tokens_BT, self._mask[:, : self._length], positions_BT)

    def join(self, other: "Runner", max_tokens: int) -> None:
        """Append the rows of another runner; both have computed all tokens of their rows.

        Args:
            other: The other runner; must not be used afterwards.
            max_tokens: Maximum number of tokens that a row is fed afterwards.
        """
        self._place(torch.cat([self._positions, other._positions]) + 1, max_tokens)
        self._cache.join(other._cache, self._length, self._length + max_tokens)

    def kept_of(self, row: int) -> Kept:
        """Return a copy of all layers' cache of a row."""
        return self._cache.take(row, int(self._positions[row]) + 1)

    def _place(self, lengths_B1: torch.Tensor, max_tokens: int) -> None:
        """Set mask and positions for right-aligned rows of the given lengths."""
        self._length = int(lengths_B1.max())
        columns_T = torch.arange(self._length + max_tokens, device=self._device)
        self._mask = columns_T >= self._length - lengths_B1
        self._positions = lengths_B1 - 1

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Feed one token per row, and return the logits [B, V] after it."""
        self._length += 1
        self._positions = self._positions + 1
        return self._forward(tokens_B[:, None], self._mask[:, : self._length], self._positions)

    def keep(self, sources: Sequence[int]) -> None:
        """Drop rows; ``sources`` has the previous row of each row that remains."""
        self._cache.keep(sources)
        sources_B = torch.tensor(sources, device=self._device)
        self._mask = self._mask[sources_B]
        self._positions = self._positions[sources_B]

    def _forward(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the model, and return the logits [rows, V] of the last tokens."""
        with unrounded_logits(self._base):
            output = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            )
        return output.logits[:, -1]


def _tokens_in_common(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the prompts' common prefix, excluding last tokens, whose logits are needed."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _grouped_decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention [B, 1, H, D] of one new token per row; longer queries use transformers' own function.

    Args:
        module: The attention module that calls.
        query: [B, H, 1, D].
        key: [B, H / G, T, D].
        value: [B, H / G, T, D].
        attention_mask: Boolean [B, 1, 1, T], True for keys that the token may attend to; None for all keys.
        kwargs: ``scaling`` of the scores; with a ``position_bias``, transformers' function is called as well.
    """
    if query.shape[2] > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, _, width = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(_GROUPED_DECODE, _grouped_decode_attention)
AttentionMaskInterface.register(_GROUPED_DECODE, sdpa_mask)


@contextmanager
def grouped_decode(config: PretrainedConfig) -> Iterator[None]:
    """Make the model of this config decode with `_grouped_decode_attention`, if it uses sdpa."""
    implementation = config._attn_implementation
    if implementation == "sdpa":
        config._attn_implementation = _GROUPED_DECODE
    try:
        yield
    finally:
        config._attn_implementation = implementation
