"""Bytes on the GPU in a GRPO step with LoRA, as arithmetic on the sizes of a decoder.

A step has two phases that want the same memory at different times: the rollout, with keys and values, and the
update, with activations. Weights, adapter and optimizer are there in both. Each class below is one part and
says by which formula; counts of parameters and bytes of weights, adapter and optimizer are exact, activations
are those of this project's update on CUDA (`qerl.lora.product`, `qerl.update.attention`,
`qerl.kernels.update`) at the moment at which most of them are alive.

Bytes everywhere. T tokens in the joined row of a forward pass, S of them predict something, M keys that its
stretches attend to, D hidden size, I intermediate size, Q and G all query and all key heads together, R LoRA
rank, V vocabulary.
"""

from dataclasses import dataclass

from qerl.families.layer import JOINT
from qerl.families.sizes import Linear, Sizes
from qerl.kernels.limits import head_positions, pad_rank
from qerl.plan.work import FULL, HALF, Work
from qerl.rollout.paged.limits import BlockDemand, KVGeometry, count_for, state_bytes
from qerl.weight_formats import WeightFormat


@dataclass(frozen=True)
class Weights:
    """The frozen model: ``4-bit or 16-bit linears + 2 (V D [twice unless tied] + norms + biases)``."""

    sizes: Sizes
    format: WeightFormat

    @property
    def linears(self) -> int:
        """Bytes of the linears of all decoder layers, scales included."""
        return self.sizes.layers * sum(self.format.matrix_bytes(x.elements) for x in self.sizes.linears)

    @property
    def dense(self) -> int:
        """Bytes of embedding, head, norms and biases."""
        return HALF * self.sizes.dense_parameters

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.linears + self.dense


@dataclass(frozen=True)
class Adapter:
    """LoRA on every layer: ``R (inputs + outputs)`` parameters per adapted linear, in fp32."""

    sizes: Sizes
    rank: int
    targets: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        widths = sum(x.inputs + x.outputs for x in self.sizes.linears if x.name in self.targets)
        return self.sizes.layers * self.rank * widths

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
        """Bytes of the engine's copies: LoRA of all seven linears in bf16, R padded, norms and rotary table
        in fp32."""
        sizes, rank = self.sizes, pad_rank(self.rank)
        widths = sum(linear.inputs + linear.outputs for linear in sizes.linears)
        norms = sizes.layers * (2 * sizes.hidden + 2 * sizes.head_size * sizes.qk_norm) + sizes.hidden
        return HALF * sizes.layers * rank * widths + FULL * (norms + sizes.positions * sizes.head_size)


@dataclass(frozen=True)
class Cache:
    """Keys and values: ``2 layers G`` numbers per token, in blocks of 64, prompts once per group.

    The paged engine reserves them by the same functions (`qerl.rollout.paged.limits`).
    """

    sizes: Sizes
    work: Work

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the cache."""
        sizes = self.sizes
        return KVGeometry(sizes.layers, sizes.kv_heads, sizes.head_size, self.work.cache_bytes)

    @property
    def demand(self) -> BlockDemand:
        """Blocks that the sequences of the work fill at their full length."""
        return BlockDemand(self.work.prompt_tokens, self.work.completion_tokens, self.work.group)

    def bytes(self, budget: int) -> int:
        """Bytes that the engine reserves if keys and values may take the budget."""
        block, (demand, rows) = self.geometry.block_bytes, self._taken
        return block * min(demand.blocks(rows), budget // block)

    @property
    def state(self) -> int:
        """``16 rows tokens`` for each number of rows that a rollout goes through: what sequences have drawn,
        and the numbers they draw by. All run side by side as long as they are short."""
        demand, rows = self._taken
        return state_bytes(rows, demand.completion_tokens)

    @property
    def _taken(self) -> tuple[BlockDemand, int]:
        """What the engine takes room for, and for how many rows."""
        demand, rows = self.demand, self.work.sequences
        if not self.work.serves:
            return demand, rows
        rows = max(rows, min(self.work.max_sequences, count_for(rows)))
        return demand.ahead(self.sizes.positions), rows

    def sequences(self, budget: int) -> int:
        """Sequences of full length that the budget holds, up to those of the work."""
        return self.demand.rows(budget // self.geometry.block_bytes, self.work.sequences)


@dataclass(frozen=True)
class Activations:
    """Bytes of what the update keeps and computes, bf16 unless said otherwise."""

    sizes: Sizes
    work: Work

    @property
    def recomputed(self) -> int:
        """Number of layers computed again for backward."""
        layers, every = self.sizes.layers, self.work.every_n_layers
        return -(-layers // every) if 0 < every <= layers else 0

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
        return (self.sizes.layers - self.recomputed) * self.layer

    @property
    def kept(self) -> int:
        """Bytes kept from the forward to the backward pass."""
        return self.inputs + self.whole_layers

    @property
    def layer(self) -> int:
        """``2 T (3 D + 2 Q + 2 G + 3 I + 7 R)``: what is kept up to attention, and behind it."""
        return self._up_to_attention + self._behind_attention

    @property
    def _up_to_attention(self) -> int:
        """``2 T (D + 2 Q + 2 G + 3 R)``: the input of q/k/v, queries, keys, values and their result, and
        x A^T of the adapters; in fp32 one number per token for the norm and each head of attention. Where
        heads are normalised, queries and keys are kept before that as well, and a number for each. Without
        joint products (NF4, dropout) layers run through PEFT, which keeps the input of each linear in fp32,
        here ``4 T 3 D``, instead of one in bf16, and with dropout a mask of a byte for each number."""
        s = self.sizes
        wide, single, inputs = s.hidden + 2 * s.queries + 2 * s.keys, 1 + s.heads, 3 * s.hidden
        if s.qk_norm:
            wide += s.queries + s.keys
            single += s.heads + s.kv_heads
        if self.work.why_not_joint:
            wide -= s.hidden
        return self._kept(wide + 3 * self.work.rank, single, inputs)

    @property
    def _behind_attention(self) -> int:
        """``2 T (2 D + 3 I + 4 R)``: the residual, the input of gate/up, gate, up and their product, and
        x A^T of the adapters; in fp32 one number per token for the norm. Through PEFT ``4 T (2 D + Q + I)``
        instead of the inputs of gate/up and of down in bf16."""
        s = self.sizes
        wide, inputs = 2 * s.hidden + 3 * s.intermediate, 2 * s.hidden + s.queries + s.intermediate
        if self.work.why_not_joint:
            wide -= s.hidden + s.intermediate
        return self._kept(wide + 4 * self.work.rank, 1, inputs)

    def _kept(self, wide: int, single: int, inputs: int) -> int:
        """Bytes of so many numbers per token in bf16 and in fp32, and of the inputs that PEFT keeps."""
        work = self.work
        if work.why_not_joint:
            single += inputs
        masks = inputs if work.why_not_joint and work.lora_dropout else 0
        return work.tokens * (HALF * wide + FULL * single + masks)

    @property
    def backward(self) -> int:
        """The larger of two moments, on top of a layer.

        Of the MLP ``2 T (2 I + D)``: gradients of gate and up, that of their product in the place of the
        product itself, and the one that came in.

        Of attention, when what is kept behind it is gone, ``2 T (D + 4 Q) + 8 M G + 4 M Q``: the gradient
        that came in, those of attention's result and of the queries, the latter in fp32 as well; keys and
        values gathered for all stretches, with their gradients; and where query heads share key heads, a
        gradient of keys and values for each query head, which FlashAttention-2 adds up afterwards. With long
        prompts of many samples M is many times T. FlashAttention-4 takes no more, so the plan does not ask
        which one a row gets."""
        s, t, m = self.sizes, self.work.tokens, self.work.keys
        mlp = HALF * t * (2 * s.intermediate + s.hidden)
        per_head = 2 * s.queries if s.heads != s.kv_heads else 0
        attention = HALF * (t * (s.hidden + 4 * s.queries) + m * (4 * s.keys + per_head))
        return max(mlp, attention - self._behind_attention)

    @property
    def head(self) -> int:
        """``2 T D + max(8 S D + tile, 10 S D)``: hidden states, and the larger of two moments
        (`qerl.update.head`). Beside a tile, whole rows of logits in fp32, stand what predicts something, its
        gradient in fp32 and, where the loss has a term of entropies, that in bf16. Without a tile stand the
        gradient in fp32, its product with the loss's and that in bf16."""
        s, d, vocabulary = self.work.scored_tokens, self.sizes.hidden, self.sizes.vocabulary
        tile = FULL * head_positions(s, vocabulary) * vocabulary
        return HALF * self.work.tokens * d + max(8 * s * d + tile, 10 * s * d)

    @property
    def working(self) -> int:
        """The larger of the head, and a layer's recomputation and backward with the last hidden states, which
        are as large as the input of a layer."""
        layer = self.backward + self._input + (self.layer if self.recomputed else 0)
        return max(self.head, layer)

    @property
    def workspace(self) -> int:
        """The largest weight in bf16 with R more rows or columns, shared by all layers: mostly that of gate
        and up together."""
        return HALF * max(self._written_at_once(group) for group in self._groups)

    @property
    def _groups(self) -> list[list[Linear]]:
        """Linears whose products the update computes as one (`qerl.update.fused`).

        Only where all of them are adapted and none runs through PEFT, and q, k and v not where heads are
        normalised.
        """
        by_name = {linear.name: linear for linear in self.sizes.linears}
        joint = [
            [by_name.pop(name) for name in names]
            for names in JOINT
            if not self.work.why_not_joint
            and set(names) <= set(self.work.targets)
            and not ("q_proj" in names and self.sizes.qk_norm)
        ]
        return joint + [[linear] for linear in by_name.values()]

    def _written_at_once(self, group: list[Linear]) -> int:
        rows = sum(linear.outputs for linear in group)
        rank = self.work.rank * len(group)
        return rows * group[0].inputs + rank * max(rows, group[0].inputs)
