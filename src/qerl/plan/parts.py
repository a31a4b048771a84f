"""GPU memory of a GRPO step with LoRA, computed from the sizes of a decoder.

A step has two phases that need the same memory at different times: the rollout, with the KV cache, and the
update, with activations. Weights, adapter and optimizer are present in both. Each class below is one part
with its formula; counts of parameters and bytes of weights, adapter and optimizer are exact, activations are
those of this project's update on CUDA (`qerl.lora.product`, `qerl.update.attention`, `qerl.kernels.update`)
at their peak. `qerl.plan.layers` has the bytes of one layer by its kind; here layers are summed.

Bytes everywhere. T tokens in the packed row of a forward pass, S of them predict a completion token, D hidden
size, G width of all key heads together, R LoRA rank, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

from qerl.families.layer import Attention, DeltaNet, RoutedMLP
from qerl.families.sizes import Sizes
from qerl.kernels.limits import pad_rank
from qerl.kernels.tensors import DIVERGENCE_ROWS, divergence_positions, head_positions
from qerl.plan.layers import LayerActivations
from qerl.plan.work import FULL, HALF, Work
from qerl.rollout.paged.limits import BlockDemand, KVGeometry, count_for, experts_bytes, state_bytes
from qerl.weight_formats import WeightFormat


@dataclass(frozen=True)
class Weights:
    """The frozen model: ``4-bit or 16-bit linears + 2 (V D [twice unless tied] + norms + biases)``."""

    sizes: Sizes
    format: WeightFormat

    @cached_property
    def linears(self) -> int:
        """Bytes of the linears of all decoder layers, scales included."""
        size = self.format.matrix_bytes
        runs = self.sizes.runs
        return sum(run.layers * count * size(x.elements) for run in runs for x, count in run.spec.matrices)

    @property
    def dense(self) -> int:
        """Bytes of embedding, head, norms and biases."""
        return HALF * self.sizes.dense_parameters

    @property
    def bytes(self) -> int:
        """Bytes of linears and dense parameters."""
        return self.linears + self.dense


@dataclass(frozen=True)
class Adapter:
    """LoRA on every layer: ``R (inputs + outputs)`` parameters per adapted linear, in fp32; experts that
    share an adapter count once."""

    sizes: Sizes
    rank: int
    targets: tuple[str, ...]
    shared: bool = True

    @classmethod
    def of(cls, sizes: Sizes, work: Work) -> "Adapter":
        """Return the adapter that a step of a model trains."""
        return cls(sizes, work.rank, work.targets, work.shared_lora)

    @cached_property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return self.rank * sum(
            run.layers * (1 if self.shared else count) * (linear.inputs + linear.outputs)
            for run in self.sizes.runs
            for linear, count in run.spec.matrices
            if linear.is_target(self.targets)
        )

    @property
    def bytes(self) -> int:
        """Bytes of the parameters."""
        return FULL * self.parameters

    @property
    def gradients(self) -> int:
        """Bytes of their gradients."""
        return FULL * self.parameters

    @property
    def copies(self) -> int:
        """Bytes of the engine's copies. In bf16: LoRA of all linears, with R padded, the linears of delta
        nets' gates, and the routers of layers with a shared expert. In fp32: norms, rotary tables, and the
        constants of delta nets."""
        sizes, mixers = self.sizes, [spec.mixer for spec in self.sizes.specs]
        nets = [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]
        tables = {mixer.rotary for mixer in mixers if isinstance(mixer, Attention)}
        angles = sizes.positions * sum(2 * rotary.pairs for rotary in tables if rotary)
        narrow = sum(net.gates(sizes.hidden) for net in nets)
        routed = [spec.mlp for spec in sizes.specs if isinstance(spec.mlp, RoutedMLP)]
        narrow += sum((mlp.experts + 1) * sizes.hidden for mlp in routed if mlp.shared)
        single = sizes.norms + angles + sum(net.constants for net in nets)
        wide = sum(run.layers * (x.inputs + x.outputs) for run in sizes.runs for x in run.spec.linears)
        for run in sizes.runs:  # if one linear of a product of experts is adapted, all have room there
            for product in run.spec.expert_products:
                if any(linear.is_target(self.targets) for linear in product.linears):
                    each = len(product.linears) * product.inputs + product.outputs
                    wide += run.layers * (1 if self.shared else run.spec.experts) * each
        return HALF * (pad_rank(self.rank) * wide + narrow) + FULL * single


@dataclass(frozen=True)
class Cache:
    """KV cache: ``2 G`` numbers per token and layer, in blocks of 64 tokens, prompts once per group. Layers
    with a recurrent state hold one per sequence and one per prompt.

    The paged engine reserves it by the same functions (`qerl.rollout.paged.limits`).
    """

    sizes: Sizes
    work: Work

    @cached_property
    def geometry(self) -> KVGeometry:
        """Shape of the cache."""
        return KVGeometry.of(self.sizes, self.work.cache_bytes)

    @cached_property
    def demand(self) -> BlockDemand:
        """Blocks of the work's sequences at their full length."""
        work, pools = self.work, self.geometry.pools
        return BlockDemand(work.prompt_tokens, work.completion_tokens, work.group, pools)

    def bytes(self, budget: int) -> int:
        """Bytes that the engine reserves within ``budget`` for keys, values and states."""
        return sum(self._reserved(budget))

    def states(self, budget: int) -> int:
        """The part of `bytes` that holds states."""
        pools = zip(self.geometry.pools, self._reserved(budget), strict=True)
        return sum(size for pool, size in pools if pool == "state")

    def _reserved(self, budget: int) -> list[int]:
        """Bytes of each pool."""
        geometry, (demand, rows) = self.geometry, self._taken
        blocks = geometry.affordable(demand.blocks(rows), demand.least, budget)
        return [count * each for count, each in zip(blocks, geometry.block_bytes, strict=True)]

    @property
    def state(self) -> int:
        """``16 rows tokens`` for each size of decode batch that a rollout goes through: sampled tokens, and
        the numbers that decide the sampling. While sequences are short, all of them run at once."""
        demand, rows = self._taken
        return state_bytes(rows, demand.completion_tokens)

    @property
    def experts(self) -> int:
        """Bytes of the experts' inputs and outputs in the engine's passes; 0 without a mixture of experts."""
        specs, work = (run.spec for run in self.sizes.runs), self.work
        adapted = any(x.is_target(work.targets) for spec in specs for x in spec.expert_linears)
        return experts_bytes(self.sizes, self._taken[1], pad_rank(work.rank) if adapted else 0)

    @property
    def _taken(self) -> tuple[BlockDemand, int]:
        """The engine's demand, and its number of rows."""
        demand, rows = self.demand, self.work.sequences
        if not self.work.serves:
            return demand, rows
        rows = max(rows, min(self.work.max_sequences, count_for(rows)))
        return demand.ahead(self.sizes.positions), rows

    def sequences(self, budget: int) -> int:
        """Number of full-length sequences that fit the budget, at most those of the work."""
        return self.demand.rows(self.geometry, budget, self.work.sequences)


@dataclass(frozen=True)
class Activations:
    """Bytes of activations that the update keeps and computes, bf16 unless said otherwise."""

    sizes: Sizes
    work: Work

    @property
    def recomputed(self) -> int:
        """Number of layers recomputed in backward."""
        return sum(self._recomputed)

    @property
    def _recomputed(self) -> list[int]:
        """Number of recomputed layers in each run: every n-th layer of the decoder, starting with the
        first."""
        counts, end, every = [], 0, self.work.every_n_layers
        for run in self.sizes.runs:
            start, end = end, end + run.layers
            counts.append(-(-end // every) - -(-start // every) if every else 0)
        return counts if every <= end else [0] * len(counts)

    @property
    def inputs(self) -> int:
        """``2 layers T D``: bytes of all layer inputs on the GPU; of offloaded ones, one at a time."""
        here = self.sizes.layers - self.recomputed + 1 if self.work.offload else self.sizes.layers
        return here * self._input

    @property
    def on_host(self) -> int:
        """``layers 2^ceil(log2(2 T D))``: CPU memory of offloaded layer inputs, which torch pins in powers of
        two; 0 without offloading."""
        return self.recomputed * (1 << (self._input - 1).bit_length()) if self.work.offload else 0

    @property
    def _input(self) -> int:
        return HALF * self.work.tokens * self.sizes.hidden

    @property
    def whole_layers(self) -> int:
        """Bytes of everything inside the layers that are not recomputed."""
        return sum(self._whole)

    @property
    def whole_delta_nets(self) -> int:
        """The part of `whole_layers` in delta nets."""
        runs = zip(self.sizes.runs, self._whole, strict=True)
        return sum(size for run, size in runs if isinstance(run.spec.mixer, DeltaNet))

    @cached_property
    def _whole(self) -> list[int]:
        """Bytes in each run of everything inside its layers that are not recomputed."""
        runs = zip(self.sizes.runs, self._kinds, self._recomputed, strict=True)
        return [(run.layers - again) * kind.kept for run, kind, again in runs]

    @property
    def kept(self) -> int:
        """Bytes kept from the forward to the backward pass."""
        return self.inputs + self.whole_layers

    @property
    def head(self) -> int:
        """``2 T D + max(8 S D + tile, 10 S D)``: hidden states, and the larger of two moments
        (`qerl.update.head`). Beside a tile, whole rows of logits in fp32: the S hidden states, their gradient
        in fp32 and, if the loss has an entropy term, in bf16 as well. Without a tile: the gradient in fp32,
        its product with the loss's gradient, and that product in bf16."""
        s, d, vocabulary = self.work.scored_tokens, self.sizes.hidden, self.sizes.vocabulary
        tile = FULL * head_positions(s, vocabulary) * vocabulary
        return HALF * self.work.tokens * d + max(8 * s * d + tile, 10 * s * d)

    @property
    def working(self) -> int:
        """The larger of the head, and the largest layer's recomputation and backward pass beside the last
        hidden states, which are as large as a layer's input."""
        runs = zip(self._kinds, self._recomputed, strict=True)
        layer = max(kind.backward + (kind.kept if again else 0) for kind, again in runs)
        return max(self.head, layer + self._input)

    @property
    def divergence(self) -> int:
        """Bytes that a teacher adds to `kept` and `working`, 0 without one: the larger of two moments. A
        server has only the second, since its client compares log-probabilities.

        Beside the head: ``2 S E`` of the teacher's hidden states (E their size), ``4 S D`` of the
        divergence's gradient, and a tile of its own in the place of the head's (`qerl.update.distillation`).
        Before the policy's pass: the teacher's pass, with a layer's input and what the layer computes."""
        teacher = self.work.teacher
        if teacher is None:
            return 0
        s, vocabulary = self.work.scored_tokens, self.sizes.vocabulary
        tile = DIVERGENCE_ROWS * FULL * divergence_positions(s, vocabulary) * vocabulary
        tile -= FULL * head_positions(s, vocabulary) * vocabulary
        beside = s * (HALF * teacher.hidden + FULL * self.sizes.hidden) + max(tile, 0)
        theirs = Activations(teacher, self.work)
        alone = theirs._input + max(kind.kept for kind in theirs._kinds) + HALF * s * teacher.hidden
        if self.work.serves:
            beside, alone = 0, max(alone, theirs.head)
        return max(beside, alone - self.kept - self.working)

    @property
    def workspace(self) -> int:
        """Buffers for dequantised weights, shared by all layers: the largest weight in bf16 with R more rows
        or columns, and the largest in E4M3."""
        return max(kind.workspace for kind in self._kinds) + max(kind.workspace_e4m3 for kind in self._kinds)

    @cached_property
    def _kinds(self) -> list[LayerActivations]:
        """The activations of one layer of each run; runs of the same layer share them."""
        kinds = {run.spec: LayerActivations(run.spec, self.work) for run in self.sizes.runs}
        return [kinds[run.spec] for run in self.sizes.runs]
