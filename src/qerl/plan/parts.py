"""Bytes on the GPU in a GRPO step with LoRA, as arithmetic on the sizes of a decoder.

A step has two phases that want the same memory at different times: the rollout, with keys and values, and the
update, with activations. Weights, adapter and optimizer are there in both. Each class below is one part with
its formula; counts of parameters and bytes of weights, adapter and optimizer are exact, activations are those
of this project's update on CUDA (`qerl.lora.product`, `qerl.update.attention`, `qerl.kernels.update`) at the
moment at which most of them are alive. `qerl.plan.layers` has the bytes of one layer by its kind; here layers
are summed.

Bytes everywhere. T tokens in the packed row of a forward pass, S of them predict something, D hidden size, R
LoRA rank, V vocabulary.
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
    """LoRA on every layer: ``R (inputs + outputs)`` parameters per adapted linear, in fp32; of experts that
    share an adapter those of one."""

    sizes: Sizes
    rank: int
    targets: tuple[str, ...]
    shared: bool = True

    @classmethod
    def of(cls, sizes: Sizes, work: Work) -> "Adapter":
        """That of a model's work."""
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
        """Bytes of the engine's copies: LoRA of all linears, R padded, the linears of delta nets' gates and
        the routers beside shared experts in bf16; norms, the rotary tables and what delta nets have beside
        linears in fp32."""
        sizes, mixers = self.sizes, [spec.mixer for spec in self.sizes.specs]
        nets = [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]
        tables = {mixer.rotary for mixer in mixers if isinstance(mixer, Attention)}
        angles = sizes.positions * sum(2 * rotary.pairs for rotary in tables if rotary)
        narrow = sum(net.gates(sizes.hidden) for net in nets)
        routed = [spec.mlp for spec in sizes.specs if isinstance(spec.mlp, RoutedMLP)]
        narrow += sum((mlp.experts + 1) * sizes.hidden for mlp in routed if mlp.shared)
        single = sizes.norms + angles + sum(net.constants for net in nets)
        wide = sum(run.layers * (x.inputs + x.outputs) for run in sizes.runs for x in run.spec.linears)
        for run in sizes.runs:  # a product of experts of which one linear is adapted has room for all
            for product in run.spec.expert_products:
                if any(linear.is_target(self.targets) for linear in product.linears):
                    each = len(product.linears) * product.inputs + product.outputs
                    wide += run.layers * (1 if self.shared else run.spec.experts) * each
        return HALF * (pad_rank(self.rank) * wide + narrow) + FULL * single


@dataclass(frozen=True)
class Cache:
    """Keys and values: ``2 G`` numbers per token and layer, in blocks of 64, prompts once per group. Layers
    that carry a state have one for each sequence, and one for each prompt.

    The paged engine reserves them by the same functions (`qerl.rollout.paged.limits`).
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
        """Bytes that the engine reserves with this budget for keys and values, and for states."""
        return sum(self._reserved(budget))

    def states(self, budget: int) -> int:
        """Bytes of those that hold states."""
        pools = zip(self.geometry.pools, self._reserved(budget), strict=True)
        return sum(size for pool, size in pools if pool == "state")

    def _reserved(self, budget: int) -> list[int]:
        """Bytes of each pool."""
        geometry, (demand, rows) = self.geometry, self._taken
        blocks = geometry.affordable(demand.blocks(rows), demand.least, budget)
        return [count * each for count, each in zip(blocks, geometry.block_bytes, strict=True)]

    @property
    def state(self) -> int:
        """``16 rows tokens`` for each number of rows that a rollout goes through: drawn tokens, and the
        numbers that decide the draws. All run side by side as long as they are short."""
        demand, rows = self._taken
        return state_bytes(rows, demand.completion_tokens)

    @property
    def experts(self) -> int:
        """Bytes of what experts read and give in the engine's passes; 0 without a mixture."""
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
        """Number of sequences of full length in the budget, up to those of the work."""
        return self.demand.rows(self.geometry, budget, self.work.sequences)


@dataclass(frozen=True)
class Activations:
    """Bytes of activations that the update keeps and computes, bf16 unless said otherwise."""

    sizes: Sizes
    work: Work

    @property
    def recomputed(self) -> int:
        """Number of layers computed again for backward."""
        return sum(self._recomputed)

    @property
    def _recomputed(self) -> list[int]:
        """Of each run, the layers computed again: every n-th of the decoder, from the first on."""
        counts, end, every = [], 0, self.work.every_n_layers
        for run in self.sizes.runs:
            start, end = end, end + run.layers
            counts.append(-(-end // every) - -(-start // every) if every else 0)
        return counts if every <= end else [0] * len(counts)

    @property
    def inputs(self) -> int:
        """``2 layers T D``: bytes of the input of every layer; of those in the CPU's memory one is here."""
        here = self.sizes.layers - self.recomputed + 1 if self.work.offload else self.sizes.layers
        return here * self._input

    @property
    def on_host(self) -> int:
        """``layers 2^ceil(log2(2 T D))``: bytes of inputs of layers in the CPU's memory, of which torch pins
        powers of two; 0 where they stay on the GPU."""
        return self.recomputed * (1 << (self._input - 1).bit_length()) if self.work.offload else 0

    @property
    def _input(self) -> int:
        return HALF * self.work.tokens * self.sizes.hidden

    @property
    def whole_layers(self) -> int:
        """Bytes of everything inside the layers that are not computed again."""
        return sum(self._whole)

    @property
    def whole_delta_nets(self) -> int:
        """Bytes of those of them that are delta nets."""
        runs = zip(self.sizes.runs, self._whole, strict=True)
        return sum(size for run, size in runs if isinstance(run.spec.mixer, DeltaNet))

    @cached_property
    def _whole(self) -> list[int]:
        """Of each run, bytes of everything inside its layers that are not computed again."""
        runs = zip(self.sizes.runs, self._kinds, self._recomputed, strict=True)
        return [(run.layers - again) * kind.kept for run, kind, again in runs]

    @property
    def kept(self) -> int:
        """Bytes kept from the forward to the backward pass."""
        return self.inputs + self.whole_layers

    @property
    def head(self) -> int:
        """``2 T D + max(8 S D + tile, 10 S D)``: hidden states, and the larger of two moments
        (`qerl.update.head`). Beside a tile, whole rows of logits in fp32, stand the S hidden states, their
        gradient in fp32 and, where the loss has a term of entropies, that in bf16. Without a tile stand
        the gradient in fp32, its product with the loss's and that in bf16."""
        s, d, vocabulary = self.work.scored_tokens, self.sizes.hidden, self.sizes.vocabulary
        tile = FULL * head_positions(s, vocabulary) * vocabulary
        return HALF * self.work.tokens * d + max(8 * s * d + tile, 10 * s * d)

    @property
    def working(self) -> int:
        """The largest of the head, and each kind of layer's recomputation and backward with the last hidden
        states, which are as large as the input of a layer."""
        runs = zip(self._kinds, self._recomputed, strict=True)
        layer = max(kind.backward + (kind.kept if again else 0) for kind, again in runs)
        return max(self.head, layer + self._input)

    @property
    def divergence(self) -> int:
        """What a teacher takes more than the largest of the above, 0 without one: the larger of two moments,
        of which a server, whose client compares log-probabilities, has the second.

        Beside the head stand ``2 S E`` of the teacher's hidden states, ``4 S D`` of the divergence's gradient
        and a tile of its own in the place of the head's (`qerl.update.distillation`). Before anything of the
        policy's pass is there, the teacher's is: the input of a layer and what it computes."""
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
        """The largest weight in bf16 with R more rows or columns, shared by all layers, and the largest in
        E4M3."""
        return max(kind.workspace for kind in self._kinds) + max(kind.workspace_e4m3 for kind in self._kinds)

    @cached_property
    def _kinds(self) -> list[LayerActivations]:
        """The activations of one layer of each run; runs of the same layer share them."""
        kinds = {run.spec: LayerActivations(run.spec, self.work) for run in self.sizes.runs}
        return [kinds[run.spec] for run in self.sizes.runs]
