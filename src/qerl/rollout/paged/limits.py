"""Limits of the paged engine: rows, memory, and the size arithmetic of its KV cache.

The engine reserves memory with these numbers and functions, and the plan predicts with the same ones.
Nothing here needs torch or a GPU.

Keys and values lie in blocks of `PAGE` tokens. A prompt is cached once for all its samples, without its last
token, which the first decode step reads; each sample has blocks of its own for the tokens it generates.

Layers with the same window share a pool: a block of it holds its tokens in all of them. A model has a pool of
layers that attend to all tokens, or one per window, or both. In a pool with a window no sequence needs more
blocks than the window and the longest prefill pass fill (`window_blocks`).

Layers that carry a state (delta nets) have a pool too. A block of it is the state of one sequence, or of one
prompt without its last token, however many tokens it has read.
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

PREFILL_TOKENS = (64, 256, 512, 2048)
"""Token counts that prefill passes are built for."""

CAPTURED_TOKENS = 512
"""Maximum tokens of a prefill pass that is captured, see `qerl.rollout.paged.prefill`."""

MAX_ROWS = ROW_COUNTS[-1]
"""Maximum number of running sequences."""

ROW_TOKEN_BYTES = 16
"""Bytes of a row per token that it may have: its uniform number, the token, its log-probability and the
entropy (`qerl.rollout.paged.rows`)."""

CACHE_SHARE = 0.6
"""Share of the memory left by the model and its training state that the KV cache may take."""

MAX_SHARE_OF_FREE = 0.95
"""Share of the currently free memory that the KV cache may take."""

Pool = int | Literal["state"] | None
"""Content that layers keep per sequence: keys and values of a window of this many tokens, those of all its
tokens (None), or a state."""

CONTEXT_BYTES = 1_200_000_000
"""CUDA context, loaded kernels, cuBLAS workspaces, captured graphs and the engine's buffers, as measured.

That was before short prefill passes were captured and kept. They hold 0.12 GB of a 7B
(prefill-7b-h200.json), and by their widths 0.2 of a 32B, which the plan does not count.

The parts of x A^T (`qerl.rollout.paged.forward`) are counted neither here nor by the plan: with R ranks
mostly 12 T ceil(D / 128) R bytes, for T = 2048 and a 7B 0.02 GB at rank 32 and 0.18 at 256, for a 32B 0.03
and 0.25. Every size of pass has its own. They fit in the memory that `CACHE_SHARE` leaves.
"""


def experts_bytes(sizes: Sizes, rows: int, rank: int = 0) -> int:
    """Return the bytes that the engine keeps for experts beside their weights.

    These are biases in fp32 and, for every size of pass, inputs and results as
    `qerl.rollout.paged.experts.Mixtures` allocates them for experts in four bits.

    Args:
        sizes: Sizes of the model.
        rows: Maximum number of running sequences.
        rank: Padded rank of the experts' own adapters, whose x A^T is counted; 0 without adapters.
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
    """Return the smallest of `ROW_COUNTS` that is at least ``rows``."""
    return next(count for count in ROW_COUNTS if count >= rows)


def state_bytes(rows: int, tokens: int) -> int:
    """Return the bytes of the rows' state in the step for ``rows`` rows and all smaller steps.

    The batch goes through the smaller steps as sequences end, and the state of each step stays allocated.

    Args:
        rows: Maximum number of running sequences.
        tokens: Maximum tokens of each.
    """
    return ROW_TOKEN_BYTES * tokens * sum(count for count in ROW_COUNTS if count <= count_for(rows))


def rows_of_step(running: int, present: int | None, small: int) -> int:
    """Return the rows of the step for a round: the fewest that hold the running sequences.

    Waiting sequences have been admitted before if memory allows, so no row is kept for them.

    Args:
        running: Number of running sequences.
        present: Rows of the step in use; None at the start of a call.
        small: Rows up to which a step is not replaced with a smaller one, see
            `qerl.rollout.paged.scheduler.Pace`.
    """
    least = running if present is None else max(running, min(present, small))
    return count_for(least)


class Units(tuple[int, ...]):
    """Number of blocks per pool. Units add up pool by pool, and exceed others if they do so in any pool."""

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
    """Return the number of blocks that consecutive tokens need at once in a pool.

    Args:
        tokens: Number of tokens, of a prompt or of a sequence's own.
        pool: Content of the pool.
        pass_tokens: Maximum tokens of a prefill pass.
        block_tokens: Tokens of a block.
    """
    if pool == "state":
        return min(tokens, 1)
    whole = -(-tokens // block_tokens)
    return whole if pool is None else min(whole, -(-(pool + pass_tokens) // block_tokens) + 1)


class Array(NamedTuple):
    """Shape of a tensor in one block, and bytes per element."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes in one block."""
        return prod(self.shape) * self.item_bytes


class Pages(NamedTuple):
    """Keys and values of a layer.

    Attributes:
        pool: Index of the layer's pool.
        heads: Number of KV heads.
        size: Elements of a head per token.
        item_bytes: Bytes per element: 2 for bf16, 1 for E4M3.
        choices: (mixtures of the model, experts per token in each) if this layer's blocks also keep the
            experts of each token; None for other layers, and for models without mixtures.
    """

    pool: int
    heads: int
    size: int
    item_bytes: int
    choices: tuple[int, int] | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of a block: keys and values [kv heads, block tokens, head size], and the numbers of the
        experts [block tokens, mixtures, chosen], one byte each, if they are kept here."""
        keys = (Array((self.heads, PAGE, self.size), self.item_bytes),) * 2
        return keys if self.choices is None else (*keys, Array((PAGE, *self.choices), 1))


class States(NamedTuple):
    """State of a delta net per sequence.

    Attributes:
        pool: Index of the layer's pool.
        net: Description of the delta net.
        item_bytes: Bytes per element of the activations, whose dtype state and inputs have.
    """

    pool: int
    net: DeltaNet
    item_bytes: int

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of a sequence.

        These are the state [value heads, key size, value size]; the last inputs of the convolution [taps,
        channels], that of position p at p modulo taps; and for the tokens since the last multiple of
        `STATE_TOKENS`, which the state does not hold yet, keys and the values written under them [tokens,
        numbers], and in fp32 sums of decays [tokens, value heads].
        """
        net, recent = self.net, STATE_TOKENS - 1
        return (
            Array((net.value_heads, net.key_size, net.value_size), self.item_bytes),
            Array((net.taps, net.channels), self.item_bytes),
            Array((recent, net.key_heads * net.key_size + net.values), self.item_bytes),
            Array((recent, net.value_heads), 4),
        )

    @property
    def moved_bytes(self) -> float:
        """Bytes that a decode step reads and writes per sequence, on average over positions."""
        state, inputs, *recent = (array.bytes for array in self.arrays)
        return state * (1 + 1 / STATE_TOKENS) + inputs + sum(recent) * (1 / 2 + 1 / STATE_TOKENS)


@dataclass(frozen=True)
class KVGeometry:
    """Shape and size of a model's cache.

    Attributes:
        pools: Content of each pool.
        layers: Content of each layer's blocks.
        layer_of_choices: Index of the layer whose blocks keep the experts of each token in all mixtures of
            the model; None if they are not kept.
    """

    pools: tuple[Pool, ...]
    layers: tuple[Pages | States, ...]
    layer_of_choices: int | None = None

    @classmethod
    def of(cls, sizes: Sizes, item_bytes: int, state_bytes: int = 2) -> "KVGeometry":
        """Return the cache geometry of a model of these sizes.

        Args:
            sizes: Sizes of the model.
            item_bytes: Bytes per element of keys and values: 2 for bf16, 1 for E4M3.
            state_bytes: Bytes per element of states, which have the activations' dtype.
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
        """Index of the pool whose blocks keep the experts of each token; None if they are not kept."""
        return None if self.layer_of_choices is None else self.layers[self.layer_of_choices].pool

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each pool, in all its layers."""
        sizes = [0] * len(self.pools)
        for layer in self.layers:
            sizes[layer.pool] += sum(array.bytes for array in layer.arrays)
        return tuple(sizes)

    def bytes(self, blocks: tuple[int, ...]) -> int:
        """Return the bytes of ``blocks``, a number of blocks per pool."""
        return sum(count * each for count, each in zip(blocks, self.block_bytes, strict=True))

    def affordable(self, wanted: Units, least: Units, budget: int) -> Units:
        """Return the blocks of each pool that a budget in bytes allows.

        These are all wanted blocks if they fit, else the least plus the same share of what is wanted beyond
        it in each pool; none if not even the least fits.
        """
        room, more = budget - self.bytes(least), self.bytes(wanted) - self.bytes(least)
        if more <= room:
            return wanted
        if room < 0:
            return Units([0] * len(least))
        return Units(few + (many - few) * room // more for few, many in zip(least, wanted, strict=True))


def _layer_of_choices(sizes: Sizes) -> int | None:
    """Return the index of the first layer that attends to all tokens, if the model has mixtures.

    The blocks of such a layer stay as long as the sequence. None without such a layer, without mixtures, or
    for more than 256 experts.
    """
    if sizes.mixture is None or sizes.mixture.experts > 256:
        return None
    return next((i for i, spec in enumerate(sizes.specs) if _pool_of(spec.mixer) is None), None)


def _pool_of(mixer: Attention | DeltaNet) -> Pool:
    return "state" if isinstance(mixer, DeltaNet) else mixer.window


@dataclass(frozen=True)
class BlockDemand:
    """Blocks that the sequences of a call fill at their maximum lengths.

    Attributes:
        prompt_tokens: Tokens of the longest prompt.
        completion_tokens: Maximum tokens of a completion.
        samples: Completions per prompt.
        pools: Content of each pool of the cache.
        pass_tokens: Maximum tokens of a prefill pass.
        ahead_tokens: Tokens per sequence for which the scheduler keeps room: those of one round and of its
            spare rounds.
        tail: Maximum tokens of its prompt that a sequence has in its own blocks.
    """

    prompt_tokens: int
    completion_tokens: int
    samples: int
    pools: tuple[Pool, ...] = (None,)
    pass_tokens: int = PREFILL_TOKENS[-1]
    ahead_tokens: int = 80
    tail: int = 0

    def ahead(self, positions: int) -> "BlockDemand":
        """Return a demand that covers this one and many later ones.

        Lengths are the next powers of two, at most ``positions``, and no sequence shares its prompt.
        """
        prompt, completion = (
            min(positions, 1 << (tokens - 1).bit_length())
            for tokens in (self.prompt_tokens, self.completion_tokens)
        )
        return replace(self, prompt_tokens=prompt, completion_tokens=completion, samples=1)

    @property
    def table_width(self) -> int:
        """Maximum number of blocks that a row of the block table lists, of a prompt or of a sample."""
        own = self.tail + self.completion_tokens
        return max(-(-(self.prompt_tokens - 1) // PAGE), -(-own // PAGE), 1)

    @property
    def least(self) -> Units:
        """Blocks that a single sequence needs to run."""
        return self._blocks(1, 1, self.pass_tokens)

    def blocks(self, rows: int) -> Units:
        """Return the blocks with which ``rows`` rows never wait for one another.

        They hold one prompt more than the groups need, because a group's first samples may end while its last
        still wait. In a pool with a window a row gets the blocks that decoding needs; a sequence that is
        computed again needs more for a moment, and may have to wait.
        """
        decoding = self._blocks(rows, -(-rows // self.samples) + 1, self.ahead_tokens + PAGE)
        return Units(map(max, decoding, self.least))

    def _blocks(self, rows: int, prompts: int, own_tokens: int) -> Units:
        """Return the blocks of rows and prompts if rows compute ``own_tokens`` of their tokens at once."""
        return Units(
            rows * window_blocks(self.tail + self.completion_tokens, pool, own_tokens)
            + prompts * window_blocks(self.prompt_tokens - 1, pool, self.pass_tokens)
            for pool in self.pools
        )

    def rows(self, geometry: KVGeometry, budget: int, most: int) -> int:
        """Return how many rows, at most ``most``, never wait for one another with this budget in bytes.

        0 if not even one sequence can run.
        """
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
    """Return the bytes that the KV cache may take.

    A run holds the model, and for trained parameters gradients, moments and a copy. These count even before
    they are allocated: a resumed run must get the same cache, and so the same order of sequences, as a run
    that was not stopped.

    Args:
        total: Bytes of the GPU.
        model_bytes: Bytes of parameters and buffers.
        trained: Number of trained parameters.
        free: Bytes that are currently free; None if unknown.
        share: Share of the remaining memory, smaller if several engines share a GPU.
    """
    budget = share * (total - model_bytes - TRAINED_BYTES * trained - CONTEXT_BYTES)
    if free is not None:
        budget = min(budget, MAX_SHARE_OF_FREE * free)
    return max(0, int(budget))
