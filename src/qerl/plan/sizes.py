"""Bytes on the GPU in a GRPO step with LoRA, as arithmetic on the sizes of a decoder.

A step has two phases that want the same memory at different times: the rollout, with keys and values, and the
update, with activations. Weights, adapter and optimizer are there in both. Each class below is one part and
says by which formula; counts of parameters and bytes of weights, adapter and optimizer are exact, activations
are those of this project's update on CUDA (`qerl.lora.product`, `qerl.trainer.update.attention`,
`qerl.kernels.update`) at the moment at which most of them are alive.

Bytes everywhere. T tokens in the packed row of a forward pass, S of them predict something, D hidden size, I
intermediate size, Q and G all query and all key heads together, R LoRA rank, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl.errors import QeRLError
from qerl.fp4.groups import FUSED_GROUPS
from qerl.kernels.limits import pad_rank
from qerl.plan.shapes import Shape
from qerl.rollout.engine import positions_of
from qerl.rollout.paged.limits import BlockDemand, KVGeometry

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are described here; the paged engine runs the same ones."""

HALF, FULL = 2, 4  # bytes of bf16 and fp32

# Bytes that an element of a linear layer's weight takes. NVFP4: half a byte, an E4M3 scale for 16. MXFP4: the
# same for 32. NF4: an fp32 scale for 64, because the paged engine undoes the double quantisation.
ELEMENT = {
    "nvfp4": 1 / 2 + 1 / 16,
    "mxfp4": 1 / 2 + 1 / 32,
    "nf4": 1 / 2 + 4 / 64,
    "bf16": 2.0,
}

HEAD_TILE = 4096 * 32768  # logits that TRL's chunked head holds at a time


@dataclass(frozen=True)
class Linear:
    """A linear layer [outputs, inputs] of a decoder layer."""

    name: str
    outputs: int
    inputs: int
    bias: bool

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    Attributes:
        qkv_bias, o_bias, mlp_bias: Which projections have a bias.
        qk_norm: Whether heads of queries and keys are normalised.
        tied: Whether the output head is the embedding.
        positions: Longest sequence.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Model":
        """From the content of a config.json; what it leaves out has the family's default.

        Raises:
            QeRLError: The family is not one of `FAMILIES`, or a field has no sense.
        """
        from transformers import AutoConfig

        family = config.get("model_type")
        if family not in FAMILIES:
            raise QeRLError(
                f"Memory is planned for the model families {', '.join(FAMILIES)}, not for {family}."
            )
        try:
            full = AutoConfig.for_model(**config)
        except Exception as error:  # given a file alone; the validators of fields have classes of their own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise QeRLError(f"The config of this {family} model is not valid: {reason}") from error
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for name in sizes:
            if getattr(full, name) < 1:
                raise QeRLError(f"The config of this {family} model has {name} {getattr(full, name)}.")
        attention_bias = bool(getattr(full, "attention_bias", False))
        return cls(
            hidden=full.hidden_size,
            intermediate=full.intermediate_size,
            layers=full.num_hidden_layers,
            heads=full.num_attention_heads,
            kv_heads=full.num_key_value_heads,
            head_size=getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads,
            vocabulary=full.vocab_size,
            positions=positions_of(full) or 0,
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(getattr(full, "mlp_bias", False)),
            qk_norm=family == "qwen3",
            tied=full.tie_word_embeddings,
        )

    @classmethod
    def from_shape(cls, shape: Shape) -> "Model":
        """One of `qerl.plan.shapes`, whose embeddings are not tied; 32768 positions."""
        sizes = dataclasses.asdict(shape)
        return cls(positions=32768, qkv_bias=sizes.pop("bias"), **sizes)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The seven projections of one decoder layer."""
        d, i, q, g = self.hidden, self.intermediate, self.queries, self.keys
        return (
            Linear("q_proj", q, d, self.qkv_bias),
            Linear("k_proj", g, d, self.qkv_bias),
            Linear("v_proj", g, d, self.qkv_bias),
            Linear("o_proj", d, q, self.o_bias),
            Linear("gate_proj", i, d, self.mlp_bias),
            Linear("up_proj", i, d, self.mlp_bias),
            Linear("down_proj", d, i, self.mlp_bias),
        )

    @property
    def queries(self) -> int:
        """Q, the width of all query heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """G, the width of all key heads."""
        return self.kv_heads * self.head_size

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.layers * sum(linear.elements for linear in self.linears) + self.dense_parameters

    @property
    def dense_parameters(self) -> int:
        """Those that stay in 16 bits: embedding, head, norms, biases."""
        biases = sum(linear.outputs for linear in self.linears if linear.bias)
        norms = 2 * self.hidden + (2 * self.head_size if self.qk_norm else 0)
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return tables + self.layers * (biases + norms) + self.hidden


@dataclass(frozen=True)
class Work:
    """What a step does, at its longest: every sample reaches the limit.

    Attributes:
        weights: Format of the linears.
        rank: R.
        targets: Names of the adapted linears.
        prompt_tokens, completion_tokens: Longest prompt and completion.
        group: Samples of a prompt.
        sequences: Samples that decode side by side.
        microbatch: Samples of a loss.
        microbatches: Losses before the optimizer steps.
        tokens_per_forward: Tokens of a forward and backward pass; a microbatch with more is computed in
            pieces. None for no limit.
        every_n_layers: Every n-th layer is computed again for backward, the others keep their activations;
            0: all keep them.
        optimizer_bytes: Of an adapter's parameter: 8 for AdamW in fp32, 2 in 8 bits.
        cache_bytes: Of a number in keys and values: 2 for bf16, 1 for fp8.
        filtered: Whether top-k, top-p or min-p leave tokens out, for which the engine sorts.
        processes: GPUs that train together, each with a whole model.
    """

    weights: str
    rank: int
    targets: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    group: int
    sequences: int
    microbatch: int
    microbatches: int = 1
    tokens_per_forward: int | None = None
    every_n_layers: int = 1
    optimizer_bytes: int = 2 * FULL
    cache_bytes: int = HALF
    filtered: bool = False
    processes: int = 1

    def tokens_of(self, samples: int) -> int:
        """Of a packed row: a group's prompt once, without its last token, and every completion token."""
        prompts = -(-samples // self.group)
        return prompts * (self.prompt_tokens - 1) + samples * self.completion_tokens

    @property
    def tokens(self) -> int:
        """T: those of a microbatch, or of its largest piece, which holds a sample whatever the limit is."""
        limit = self.tokens_per_forward or self.tokens_of(self.microbatch)
        return min(self.tokens_of(self.microbatch), max(limit, self.tokens_of(1)))

    @property
    def scored_tokens(self) -> int:
        """S: at most all but one prompt."""
        return min(self.microbatch * self.completion_tokens, self.tokens - (self.prompt_tokens - 1))

    @property
    def passes(self) -> int:
        """Backward passes before the optimizer steps, or more."""
        return self.microbatches * -(-self.tokens_of(self.microbatch) // self.tokens)


@dataclass(frozen=True)
class Weights:
    """The frozen model: ``4-bit or 16-bit linears + 2 (V D [twice unless tied] + norms + biases)``."""

    model: Model
    format: str

    @property
    def linears(self) -> int:
        """Of all decoder layers; NVFP4 has an fp32 scale for each matrix besides."""
        matrices = self.model.linears
        scales = FULL * len(matrices) if self.format == "nvfp4" else 0
        elements = sum(linear.elements for linear in matrices)
        return self.model.layers * (round(elements * ELEMENT[self.format]) + scales)

    @property
    def dense(self) -> int:
        """Embedding, head, norms and biases."""
        return HALF * self.model.dense_parameters

    @property
    def bytes(self) -> int:
        return self.linears + self.dense


@dataclass(frozen=True)
class Adapter:
    """LoRA on every layer: ``R (inputs + outputs)`` parameters for each adapted linear, in fp32."""

    model: Model
    rank: int
    targets: tuple[str, ...]

    @property
    def parameters(self) -> int:
        widths = sum(x.inputs + x.outputs for x in self.model.linears if x.name in self.targets)
        return self.model.layers * self.rank * widths

    @property
    def bytes(self) -> int:
        return FULL * self.parameters

    @property
    def gradients(self) -> int:
        return FULL * self.parameters

    @property
    def copies(self) -> int:
        """What the engine reads: bf16, all seven linears, R padded; norms and rotary table in fp32."""
        model, rank = self.model, pad_rank(self.rank)
        widths = sum(linear.inputs + linear.outputs for linear in model.linears)
        norms = model.layers * (2 * model.hidden + 2 * model.head_size * model.qk_norm) + model.hidden
        return HALF * model.layers * rank * widths + FULL * (norms + model.positions * model.head_size)


@dataclass(frozen=True)
class Cache:
    """Keys and values: ``2 layers G`` numbers per token, in blocks of 64, prompts once per group.

    The paged engine reserves them by the same functions (`qerl.rollout.paged.limits`).
    """

    model: Model
    work: Work

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the cache."""
        model = self.model
        return KVGeometry(model.layers, model.kv_heads, model.head_size, self.work.cache_bytes)

    @property
    def demand(self) -> BlockDemand:
        """Blocks that the sequences of the work fill at their full length."""
        return BlockDemand(self.work.prompt_tokens, self.work.completion_tokens, self.work.group)

    def bytes(self, budget: int) -> int:
        """What the engine reserves if keys and values may take so many bytes."""
        block = self.geometry.block_bytes
        return block * min(self.demand.blocks(self.work.sequences), budget // block)

    def sequences(self, budget: int) -> int:
        """Sequences of full length that so many bytes hold, up to those of the work."""
        return self.demand.rows(budget // self.geometry.block_bytes, self.work.sequences)


@dataclass(frozen=True)
class Activations:
    """What the update keeps and computes, bf16 unless said otherwise."""

    model: Model
    work: Work

    @property
    def recomputed(self) -> int:
        """Layers computed again for backward."""
        return -(-self.model.layers // self.work.every_n_layers) if self.work.every_n_layers else 0

    @property
    def inputs(self) -> int:
        """``2 layers T D``: the input of every layer."""
        return self.model.layers * HALF * self.work.tokens * self.model.hidden

    @property
    def whole_layers(self) -> int:
        """All of a layer that is not computed again."""
        return (self.model.layers - self.recomputed) * self.layer

    @property
    def kept(self) -> int:
        """From the forward to the backward pass."""
        return self.inputs + self.whole_layers

    @property
    def layer(self) -> int:
        """``2 T (3 D + 2 Q + 2 G + 3 I + 7 R)``: inputs of q/k/v and gate/up, the residual between, queries,
        keys, values and their result, gate, up and their product, and the adapters' low rows; fp32 for each
        row of both norms and each head of attention. NF4 layers run through PEFT, which keeps the input of
        each of the seven in fp32, ``4 T (5 D + Q + I)``, and bitsandbytes, so that those of q/k/v, of gate/up
        and of down are not needed in bf16."""
        m, t = self.model, self.work.tokens
        wide = 3 * m.hidden + 2 * m.queries + 2 * m.keys + 3 * m.intermediate
        single = 2 + m.heads
        if self.work.weights == "nf4":
            wide -= 2 * m.hidden + m.intermediate
            single += 5 * m.hidden + m.queries + m.intermediate
        return HALF * t * (wide + 7 * self.work.rank) + FULL * t * single

    @property
    def backward(self) -> int:
        """``2 T (2 I + D)`` on top of a layer: gradients of gate and up, that of their product in the place
        of the product itself, and the one that came in."""
        return HALF * self.work.tokens * (2 * self.model.intermediate + self.model.hidden)

    @property
    def head(self) -> int:
        """``2 T D + 10 S D`` and a tile of logits: hidden states, those that predict something (selected
        twice), their gradient in fp32 and in bf16."""
        d = self.model.hidden
        tile = HALF * HEAD_TILE * min(1.0, self.work.scored_tokens / 4096)
        return HALF * self.work.tokens * d + 10 * self.work.scored_tokens * d + round(tile)

    @property
    def working(self) -> int:
        """The larger of the head, and a layer's recomputation and backward with the last hidden states."""
        last = HALF * self.work.tokens * self.model.hidden
        layer = self.backward + last + (self.layer if self.recomputed else 0)
        return max(self.head, layer)

    @property
    def workspace(self) -> int:
        """The largest weight in bf16 with R more rows or columns, shared by all layers: mostly that of gate
        and up together."""
        return HALF * max(self._written_at_once(group) for group in self._groups)

    @property
    def _groups(self) -> list[list[Linear]]:
        """Linears whose products the update computes as one (`qerl.trainer.update.fused`).

        Only where all of them are adapted; not in NF4, and q, k and v not where heads are normalised.
        """
        by_name = {linear.name: linear for linear in self.model.linears}
        joined = [
            [by_name.pop(name) for name in names]
            for names in FUSED_GROUPS
            if self.work.weights != "nf4"
            and set(names) <= set(self.work.targets)
            and not ("q_proj" in names and self.model.qk_norm)
        ]
        return joined + [[linear] for linear in by_name.values()]

    def _written_at_once(self, group: list[Linear]) -> int:
        rows = sum(linear.outputs for linear in group)
        rank = self.work.rank * len(group)
        return rows * group[0].inputs + rank * max(rows, group[0].inputs)
