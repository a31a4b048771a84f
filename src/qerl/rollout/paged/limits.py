"""What the paged engine may take: rows, memory, and the arithmetic of its keys and values.

The engine reserves memory by these numbers and functions, and the plan predicts by the same ones. Nothing
here needs torch or a GPU.

Keys and values lie in blocks of `PAGE` tokens. A prompt is cached once for all its samples, without its last
token, which the first decode step reads; each sample has blocks of its own for the tokens it generates.

Layers that see as far as each other share a pool: a block of it holds its tokens in all of them. A model has
a pool of layers that see everything, or one of layers with a window, or both. In a pool with a window nobody
needs more blocks than the window and the longest pass of prefill fill (`window_blocks`).

Layers that carry a state (delta nets) have a pool too. A block of it is the state of one sequence, or of one
prompt without its last token, whatever number of tokens it has read.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from operator import add
from typing import Literal, NamedTuple, cast

from qerl.families.layer import Attention, DeltaNet, LayerSpec
from qerl.families.sizes import Sizes
from qerl.kernels.limits import PAGE, STATE_TOKENS, item_size, most_items, parts_of

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
"""Numbers of rows for which decode steps are captured, each when it is first needed.

A step has a state of its own (`state_bytes`), so all of these together take 1.2 times the state of powers of
two alone; the graphs share their memory. On an H200 a step of 192 rows took longer than one of 256, and one
of 384 longer than two of 256 (rollout-7b-h200-8ab9739.json).
"""

PREFILL_TOKENS = (64, 512, 2048)
"""Tokens that passes of prefill are made for."""

MAX_ROWS = ROW_COUNTS[-1]
"""Sequences that decode side by side at most."""

ROW_TOKEN_BYTES = 16
"""Bytes of a row for each token that it may generate: its uniform number, the token, its log-probability and
the entropy (`qerl.rollout.paged.rows`)."""

CACHE_SHARE = 0.6
"""Share of the memory beside the model and its training state that keys and values may take."""

MAX_SHARE_OF_FREE = 0.95
"""Share of the memory that is free at the moment that keys and values may take."""

Pool = int | Literal["state"] | None
"""What layers keep of a sequence: keys and values of a window of so many tokens, those of all its tokens
(None), or a state."""

CONTEXT_BYTES = 1_200_000_000
"""CUDA context, loaded kernels, cuBLAS workspaces, captured graphs and the engine's buffers, as measured.

The parts of x A^T (`qerl.rollout.paged.forward`) are counted neither here nor by the plan: with R ranks
mostly 12 T ceil(D / 128) R bytes, for T = 2048 and a 7B 0.02 GB at rank 32 and 0.18 at 256, for a 32B 0.03
and 0.25. Each number of tokens that passes are made for has its own. They lie in what `CACHE_SHARE` leaves.
"""


def experts_bytes(sizes: Sizes, rows: int, rank: int = 0) -> int:
    """Bytes that the engine keeps for experts beside their weights: biases in fp32, and of each number of
    tokens that it makes passes for inputs and results, as `qerl.rollout.paged.experts.Mixtures` allocates
    them for experts in four bits.

    Args:
        sizes: Of the model.
        rows: Sequences that decode side by side.
        rank: Padded rank of the experts' own adapters, of which x A^T is counted; 0 without.
    """
    mlp, hidden = sizes.mixture, sizes.hidden
    if mlp is None:
        return 0
    biased = sum(spec.experts > 0 for spec in sizes.specs) if mlp.bias else 0
    total = 4 * biased * mlp.experts * (1 + 2 * mlp.intermediate + hidden)
    for tokens in (*PREFILL_TOKENS, *(count for count in ROW_COUNTS if count <= count_for(rows))):
        size = item_size(tokens, mlp.experts, mlp.chosen)
        places = size * most_items(tokens, mlp.experts, mlp.chosen, size)
        each = 2 * (hidden + mlp.intermediate) + 4 * max(hidden, 2 * mlp.intermediate)
        linears = max(2 * parts_of(places, hidden), parts_of(places, mlp.intermediate))
        each += 4 * rank * linears
        total += places * each + 4 * tokens * mlp.experts * -(-hidden // (64 if tokens <= 32 else 128))
    return total


TRAINED_BYTES = 4 + 8 + 2
"""Bytes per trained parameter beside the parameter: gradient, AdamW's moments, the engine's 16-bit copy."""


def count_for(rows: int) -> int:
    """The smallest of `ROW_COUNTS` that holds so many rows."""
    return next(count for count in ROW_COUNTS if count >= rows)


def state_bytes(rows: int, tokens: int) -> int:
    """Bytes of the rows' state, which stays: of the step that so many rows begin with, and of all smaller
    ones, through which they go as sequences end.

    Args:
        rows: Sequences that run side by side.
        tokens: That each may generate.
    """
    return ROW_TOKEN_BYTES * tokens * sum(count for count in ROW_COUNTS if count <= count_for(rows))


def rows_of_step(running: int, present: int | None, small: int) -> int:
    """Rows of the step that a round is decoded with: the fewest that hold what runs.

    Those that wait for a row have been admitted by then, as far as memory allows, so no row is kept for them.

    Args:
        running: Sequences that run.
        present: Rows of the step in use; None at the start of a call.
        small: Rows up to which no smaller step is taken, see `qerl.rollout.paged.scheduler.Pace`.
    """
    least = running if present is None else max(running, min(present, small))
    return count_for(least)


class Units(tuple[int, ...]):
    """Blocks of each pool. They add up pool by pool, and are more than others if they are in any pool."""

    __slots__ = ()

    def __add__(self, other: object) -> "Units":
        if other == 0:  # with which ``sum`` begins
            return self
        return Units(map(add, self, cast(tuple[int, ...], other)))

    __radd__ = __add__

    def __gt__(self, other: tuple[int, ...]) -> bool:
        return any(mine > theirs for mine, theirs in zip(self, other, strict=True))

    def __le__(self, other: tuple[int, ...]) -> bool:
        return not self > other

    def __ge__(self, other: tuple[int, ...]) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def __lt__(self, other: tuple[int, ...]) -> bool:
        return not self >= other

    def __bool__(self) -> bool:
        return any(self)


def window_blocks(tokens: int, pool: Pool, pass_tokens: int, block_tokens: int = PAGE) -> int:
    """Blocks that so many neighbouring tokens need at once in a pool.

    Args:
        tokens: Of a prompt, or of a sequence itself.
        pool: What it holds.
        pass_tokens: Tokens that a pass of prefill computes at most.
        block_tokens: Tokens of a block.
    """
    if pool == "state":
        return min(tokens, 1)
    whole = -(-tokens // block_tokens)
    return whole if pool is None else min(whole, -(-(pool + pass_tokens) // block_tokens) + 1)


class Array(NamedTuple):
    """Shape of a tensor in one block, and bytes per number."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of it."""
        return prod(self.shape) * self.item_bytes


class Pages(NamedTuple):
    """Keys and values of a layer.

    Attributes:
        pool: Of the layer.
        heads: Of keys, and as many of values.
        size: Numbers of a head per token.
        item_bytes: 2 for bf16, 1 for E4M3.
        choices: (mixtures of the model, experts that each token takes in one), which are kept beside the
            keys of this layer; None for those of another, or of a model without.
    """

    pool: int
    heads: int
    size: int
    item_bytes: int
    choices: tuple[int, int] | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Keys and values of a block, [kv heads, block tokens, head size], and the numbers of the experts
        [block tokens, mixtures, chosen], a byte each."""
        keys = (Array((self.heads, PAGE, self.size), self.item_bytes),) * 2
        return keys if self.choices is None else (*keys, Array((PAGE, *self.choices), 1))


class States(NamedTuple):
    """What a delta net keeps of a sequence.

    Attributes:
        pool: Of the layer.
        net: Its description.
        item_bytes: Those of the activations, in whose dtype state and inputs are.
    """

    pool: int
    net: DeltaNet
    item_bytes: int

    @property
    def arrays(self) -> tuple[Array, ...]:
        """A sequence's state [value heads, key size, value size]; the last inputs of its convolution [taps,
        channels], that of position p at p modulo taps; and of the tokens since a position that is a multiple
        of `STATE_TOKENS` what the state does not hold yet: keys and what is written under them [tokens,
        numbers], and in fp32 sums of decays [tokens, value heads]."""
        net, recent = self.net, STATE_TOKENS - 1
        return (
            Array((net.value_heads, net.key_size, net.value_size), self.item_bytes),
            Array((net.taps, net.channels), self.item_bytes),
            Array((recent, net.key_heads * net.key_size + net.values), self.item_bytes),
            Array((recent, net.value_heads), 4),
        )

    @property
    def moved_bytes(self) -> float:
        """Bytes that a decode step reads and writes of a sequence, on average over positions."""
        state, inputs, *recent = (array.bytes for array in self.arrays)
        return state * (1 + 1 / STATE_TOKENS) + inputs + sum(recent) * (1 / 2 + 1 / STATE_TOKENS)


@dataclass(frozen=True)
class KVGeometry:
    """Shape and size of a model's cache.

    Attributes:
        pools: What each holds.
        layers: What each layer has there.
        layer_of_choices: The layer whose pages keep the experts of each token, of all mixtures of the model;
            None where none are kept.
    """

    pools: tuple[Pool, ...]
    layers: tuple[Pages | States, ...]
    layer_of_choices: int | None = None

    @classmethod
    def of(cls, sizes: Sizes, item_bytes: int, state_bytes: int = 2) -> "KVGeometry":
        """The cache of a model of these sizes.

        Args:
            sizes: Of the model.
            item_bytes: Bytes per number of keys and values: 2 for bf16, 1 for E4M3.
            state_bytes: Bytes per number of states, which are in the activations' dtype.
        """
        pools = tuple(dict.fromkeys(_pool_of(spec.mixer) for spec in sizes.specs))
        specs, keeper = sizes.specs, _layer_of_choices(sizes)

        def held_by(number: int, spec: LayerSpec) -> Pages | States:
            mixer, pool = spec.mixer, pools.index(_pool_of(spec.mixer))
            if isinstance(mixer, DeltaNet):
                return States(pool, mixer, state_bytes)
            choices = None
            if number == keeper and sizes.mixture is not None:
                choices = sum(each.experts > 0 for each in specs), sizes.mixture.chosen
            return Pages(pool, mixer.kv_heads, mixer.head_size, item_bytes, choices)

        return cls(pools, tuple(held_by(*each) for each in enumerate(specs)), keeper)

    @cached_property
    def pool_of_choices(self) -> int | None:
        """The pool whose blocks keep the experts of each token; None where none are kept."""
        return None if self.layer_of_choices is None else self.layers[self.layer_of_choices].pool

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each pool, in all its layers."""
        sizes = [0] * len(self.pools)
        for layer in self.layers:
            sizes[layer.pool] += sum(array.bytes for array in layer.arrays)
        return tuple(sizes)

    def bytes(self, blocks: tuple[int, ...]) -> int:
        """Bytes of so many blocks of each pool."""
        return sum(count * each for count, each in zip(blocks, self.block_bytes, strict=True))

    def affordable(self, wanted: Units, least: Units, budget: int) -> Units:
        """Blocks of each pool in the budget: those that are wanted, or as many beyond the least as their
        share of all that is wanted beyond it; fewer than the least where not even those fit."""
        room, more = budget - self.bytes(least), self.bytes(wanted) - self.bytes(least)
        if more <= room:
            return wanted
        if room < 0:
            return Units([0] * len(least))
        return Units(few + (many - few) * room // more for few, many in zip(least, wanted, strict=True))


def _layer_of_choices(sizes: Sizes) -> int | None:
    """The first layer with attention without a window, whose pages stay as long as the sequence, of a model
    with mixtures of at most 256 experts; None where there is none."""
    if sizes.mixture is None or sizes.mixture.experts > 256:
        return None
    return next((i for i, spec in enumerate(sizes.specs) if _pool_of(spec.mixer) is None), None)


def _pool_of(mixer: Attention | DeltaNet) -> Pool:
    return "state" if isinstance(mixer, DeltaNet) else mixer.window


@dataclass(frozen=True)
class BlockDemand:
    """Blocks that the sequences of a call fill at their longest.

    Attributes:
        prompt_tokens: Tokens of the longest prompt.
        completion_tokens: Tokens that a completion may have.
        samples: Completions per prompt.
        pools: Of the cache.
        pass_tokens: Tokens that a pass of prefill computes at most.
        ahead_tokens: Tokens of a sequence for which the scheduler keeps room: those of a round and of the
            rounds that it leaves free.
        tail: Tokens of its prompt that a sequence has in its own blocks at most.
    """

    prompt_tokens: int
    completion_tokens: int
    samples: int
    pools: tuple[Pool, ...] = (None,)
    pass_tokens: int = PREFILL_TOKENS[-1]
    ahead_tokens: int = 80
    tail: int = 0

    def ahead(self, positions: int) -> "BlockDemand":
        """A demand that holds this one and many that may follow: lengths are the next powers of two, as far
        as the model's positions go, and no sequence shares its prompt."""
        prompt, completion = (
            min(positions, 1 << (tokens - 1).bit_length())
            for tokens in (self.prompt_tokens, self.completion_tokens)
        )
        return replace(self, prompt_tokens=prompt, completion_tokens=completion, samples=1)

    @property
    def table_width(self) -> int:
        """Blocks that a row of the block table must list, those of a prompt or those of a sample."""
        own = self.tail + self.completion_tokens
        return max(-(-(self.prompt_tokens - 1) // PAGE), -(-own // PAGE), 1)

    @property
    def least(self) -> Units:
        """Blocks without which not even one sequence can run."""
        return self._blocks(1, 1, self.pass_tokens)

    def blocks(self, rows: int) -> Units:
        """Blocks with which that many rows never wait for one another: one prompt more than their groups
        need, because a group's first samples may end while the last still wait. Behind a window a row has
        what it needs to decode; one that is computed again needs more for a moment, and may have to wait."""
        decoding = self._blocks(rows, -(-rows // self.samples) + 1, self.ahead_tokens + PAGE)
        return Units(map(max, decoding, self.least))

    def _blocks(self, rows: int, prompts: int, own_tokens: int) -> Units:
        """Those of rows that compute so many of their own tokens at once."""
        return Units(
            rows * window_blocks(self.tail + self.completion_tokens, pool, own_tokens)
            + prompts * window_blocks(self.prompt_tokens - 1, pool, self.pass_tokens)
            for pool in self.pools
        )

    def rows(self, geometry: KVGeometry, budget: int, most: int) -> int:
        """Rows, up to ``most``, that never wait for one another with this budget in bytes; 0 if none can
        run."""
        if geometry.bytes(self.least) > budget:
            return 0
        return max(1, bisect_right(range(1, most + 1), budget, key=lambda n: geometry.bytes(self.blocks(n))))


def cache_budget(
    total: int,
    model_bytes: int,
    trained: int,
    free: int | None = None,
    share: float = CACHE_SHARE,
) -> int:
    """Bytes that keys and values may take.

    A run holds the model, and gradients, moments and a copy of what it trains. These are counted whether they
    are there yet or not: a resumed run must get the cache, and so the order in which sequences run, of one
    that was not stopped.

    Args:
        total: Bytes of the GPU.
        model_bytes: Bytes of parameters and buffers.
        trained: Number of trained parameters.
        free: Bytes that are free at the moment; None where that is not known.
        share: Share of what is left beside all that, less where several engines share a GPU.
    """
    budget = share * (total - model_bytes - TRAINED_BYTES * trained - CONTEXT_BYTES)
    if free is not None:
        budget = min(budget, MAX_SHARE_OF_FREE * free)
    return max(0, int(budget))
