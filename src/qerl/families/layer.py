"""Descriptions of decoder layers: a mixer of tokens, an MLP after it, and the linears and norms of both.

`Attention`, `DeltaNet`, `GatedMLP` and `RoutedMLP` are the kinds of the described families; each lists its
products. Four-bit scales, LoRA, memory plan and paged engine read linears and products from here, so a new
kind takes a class here and a function in each of these. A difference between layers of one model, such as a
window, sinks, the size of heads or no rotary embedding, is a field of their kind; every layer has a mixer and
an MLP.

Nothing here needs torch.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

Places = dict[str, tuple[str, ...]]
"""Places of linears within a decoder layer, by the product that multiplies their common input."""


@dataclass(frozen=True)
class Linear:
    """A linear layer [outputs, inputs] of a decoder layer.

    Attributes:
        place: Its qualified name inside the decoder layer, such as ``self_attn.q_proj``.
    """

    place: str
    outputs: int
    inputs: int
    bias: bool

    @property
    def name(self) -> str:
        """The last part of its place, in the form of LoRA's targets; for shared experts with the name of
        their module, since other experts have linears with the same last names."""
        words = self.place.split(".")
        return ".".join(words[-2 if "shared_expert" in words else -1 :])

    def is_target(self, targets: Collection[str]) -> bool:
        """Return True if one of LoRA's targets, whole places or ends of places, names this linear."""
        return any(self.place == target or self.place.endswith(f".{target}") for target in targets)

    @property
    def elements(self) -> int:
        """Elements of its weight."""
        return self.outputs * self.inputs


class Product(NamedTuple):
    """Linears that read the same input, computed as one GEMM: fused QKV, gate and up."""

    name: str
    linears: tuple[Linear, ...]

    @property
    def outputs(self) -> int:
        """Outputs of all its linears."""
        return sum(linear.outputs for linear in self.linears)

    @property
    def inputs(self) -> int:
        """Width of their input."""
        return self.linears[0].inputs


class Rotary(NamedTuple):
    """The rotary embedding of a head: the rotated dimensions, and where the angles come from.

    Dimension ``i`` is rotated with dimension ``i + stride``, for every ``i`` below ``pairs``; the others stay
    as they are. If only the first part of a head is rotated, ``pairs == stride``; transformers' proportional
    kind has the stride of a wholly rotated head.

    Attributes:
        frequencies: Place in the decoder of each pair's angle per position.
    """

    frequencies: str
    pairs: int
    stride: int

    @property
    def scaling(self) -> str:
        """Place of the factor of cosine and sine."""
        return self.frequencies.replace("inv_freq", "attention_scaling")


class PositionScale(NamedTuple):
    """Queries at position p are multiplied by ``1 + beta ln(1 + floor(p / positions))``."""

    beta: float
    positions: int


@dataclass(frozen=True)
class Attention:
    """Softmax attention of several query heads per key head.

    Attributes:
        qkv_bias, o_bias: Which projections have a bias.
        qk_norm: ``head`` if each head of queries and keys is normalised, ``all`` if all heads together are.
        v_norm: True if each head of values is normalised, without a weight.
        k_is_v: True if there is no projection of values: they are the keys before norm and rotation.
        fused: True if one linear, `JOINED`, makes queries, keys and values.
        gated: True if the query projection gives each head, after its query, a gate whose sigmoid multiplies
            the head's output.
        window: Number of tokens that a token attends to, itself included; None for all before it.
        sinks: True if each query head has a sink, a logit in the softmax without a value.
        rotary: None without rotary embedding.
        scale: Factor of the scores; None for ``head_size ** -0.5``.
        position_scale: Factor of queries by position.
    """

    heads: int
    kv_heads: int
    head_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    v_norm: bool = False
    k_is_v: bool = False
    fused: bool = False
    gated: bool = False
    window: int | None = None
    sinks: bool = False
    rotary: Rotary | None = None
    scale: float | None = None
    position_scale: PositionScale | None = None

    PLACES: ClassVar[Places] = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
    }
    JOINED: ClassVar[str] = "self_attn.qkv_proj"

    @property
    def queries(self) -> int:
        """Q, heads * head_size."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """G, kv_heads * head_size."""
        return self.kv_heads * self.head_size

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def norms(self) -> int:
        """Elements of its own norms."""
        return {"": 0, "head": 2 * self.head_size, "all": self.queries + self.keys}[self.qk_norm]

    def dense(self, hidden: int) -> int:
        """Elements of 16-bit parameters other than linears and norms, for inputs of this width."""
        return self.heads if self.sinks else 0

    @property
    def summed(self) -> set[str]:
        """Names of products whose partial sums are added up before another kernel reads them."""
        return {name for name, whole in (("qkv", self.qk_norm == "all"), ("o", self.o_bias)) if whole}

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Its products in the order in which they are computed, for inputs of this width."""
        q, g = self.queries, self.keys
        places = self.PLACES["qkv"]
        first = 2 * q if self.gated else q
        rows: tuple[int, ...] = (first, g) if self.k_is_v else (first, g, g)
        if self.fused:
            places, rows = (self.JOINED,), (sum(rows),)
        return (
            _product("qkv", places[: len(rows)], rows, hidden, self.qkv_bias),
            _product("o", self.PLACES["o"], (hidden,), q, self.o_bias),
        )


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta rule: each value head has a state S, which every token reads and updates.

    A short causal convolution goes over queries, keys and values. Then, with q and k normalised to length 1,
    ``S = decay S; S = S + k (beta (v - S^T k))^T; y = S^T q / sqrt(key_size)``, and y passes a norm and the
    gate ``silu(z)``. Decay and beta are two numbers per token and value head, made by two narrow linears that
    stay in 16 bits and have no adapter.

    Attributes:
        key_heads: Heads of queries, and of keys; each serves value_heads / key_heads neighbouring value
            heads.
        key_size, value_size: Width of a head; a state is [key_size, value_size].
        taps: Tokens that the convolution sees, the present one included.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int = 4

    PLACES: ClassVar[Places] = {
        "qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "out": ("linear_attn.out_proj",),
    }
    GATES: ClassVar[tuple[str, str]] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")

    @property
    def channels(self) -> int:
        """C, the channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def values(self) -> int:
        """Width of the values of all heads, and of the output."""
        return self.value_heads * self.value_size

    @property
    def state(self) -> int:
        """Elements of the states of all heads."""
        return self.value_heads * self.key_size * self.value_size

    @property
    def norms(self) -> int:
        """Elements of the norm of its output."""
        return self.value_size

    def gates(self, hidden: int) -> int:
        """Elements of both linears of decay and beta."""
        return 2 * self.value_heads * hidden

    @property
    def constants(self) -> int:
        """Elements of the two constants per value head, and of the convolution."""
        return 2 * self.value_heads + self.channels * self.taps

    def dense(self, hidden: int) -> int:
        """Elements of 16-bit parameters other than norms and the linears in its products."""
        return self.gates(hidden) + self.constants

    @property
    def summed(self) -> set[str]:
        """Names of products whose partial sums are added up before another kernel reads them."""
        return set()

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Its products in the order in which they are computed, for inputs of this width."""
        rows = (self.channels, self.values)
        return (
            _product("qkvz", self.PLACES["qkvz"], rows, hidden, False),
            _product("out", self.PLACES["out"], (hidden,), self.values, False),
        )


@dataclass(frozen=True)
class GatedMLP:
    """``down(activation(gate x) * up x)``.

    Attributes:
        activation: ``silu`` for SwiGLU; ``gelu_tanh`` is GELU in its tanh approximation.
        fused: True if one linear, `JOINED`, computes gate and up.
    """

    intermediate: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    fused: bool = False

    PLACES: ClassVar[Places] = {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
    JOINED: ClassVar[str] = "mlp.gate_up_proj"

    @property
    def inner(self) -> int:
        """Width between its products, which are computed for all tokens."""
        return self.intermediate

    @property
    def summed(self) -> set[str]:
        """Names of products whose partial sums are added up before another kernel reads them."""
        return {"gate_up", "down"} if self.bias else set()

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Its products in the order in which they are computed, for inputs of this width."""
        i = self.intermediate
        places = self.PLACES["gate_up"]
        rows: tuple[int, ...] = (i, i)
        if self.fused:
            places, rows = (self.JOINED,), (2 * i,)
        return (
            _product("gate_up", places, rows, hidden, self.bias),
            _product("down", self.PLACES["down"], (hidden,), i, self.bias),
        )


class Clamp(NamedTuple):
    """An expert's inner activation ``(up + 1) gate sigmoid(slope gate)``, with gate clamped to at most
    ``limit``, and up to between ``-limit`` and ``limit``."""

    slope: float
    limit: float


@dataclass(frozen=True)
class RoutedMLP:
    """A mixture: each token goes through some of several gated MLPs, whose results are added with weights.

    The router is a linear with one output per expert, in 16 bits and without an adapter, and a softmax over
    all experts. `of_expert` describes one expert for all: unlike those in `LayerSpec.products`, the experts'
    products are not computed for all tokens.

    Attributes:
        intermediate: I of an expert.
        experts: E.
        chosen: Experts per token.
        normalized: True if the weights of a token's experts add up to 1, else they are the softmax's.
        bias: True if router and experts have biases.
        clamp: Activation between an expert's products; None for ``silu(gate) up``.
        router: Place of the router.
        shared: Intermediate size of the shared expert, a gated MLP that all tokens go through beside their
            experts, times the sigmoid of a linear with one output; 0 without one.
    """

    intermediate: int
    experts: int
    chosen: int
    normalized: bool
    bias: bool = False
    clamp: Clamp | None = None
    router: str = "mlp.gate"
    shared: int = 0
    activation: ClassVar[Literal["silu"]] = "silu"
    fused: ClassVar[bool] = False

    PLACES: ClassVar[Places] = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    EXPERTS: ClassVar[str] = "mlp.experts"
    SHARED: ClassVar[Places] = {
        "gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "down": ("mlp.shared_expert.down_proj",),
    }
    SHARED_GATE: ClassVar[str] = "mlp.shared_expert_gate"

    @property
    def inner(self) -> int:
        """Width between those of its products that are computed for all tokens."""
        return self.shared

    @property
    def summed(self) -> set[str]:
        """Names of products whose partial sums are added up before another kernel reads them."""
        return set()

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The products of the shared expert: linears of other experts are not computed for all tokens."""
        if not self.shared:
            return ()
        return (
            _product("gate_up", self.SHARED["gate_up"], (self.shared,) * 2, hidden, False),
            _product("down", self.SHARED["down"], (hidden,), self.shared, False),
        )

    def of_expert(self, hidden: int) -> tuple[Product, Product]:
        """The products of an expert; places are names within it."""
        i = self.intermediate
        return (
            _product("gate_up", self.PLACES["gate_up"], (i, i), hidden, self.bias),
            _product("down", self.PLACES["down"], (hidden,), i, self.bias),
        )


class Norms(NamedTuple):
    """Places within a decoder layer of the RMSNorms around mixer and MLP; empty where there is none."""

    before_mixer: str = "input_layernorm"
    behind_mixer: str = ""
    before_mlp: str = "post_attention_layernorm"
    behind_mlp: str = ""


BEFORE = Norms()
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
BEHIND = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: a mixer and an MLP on a residual stream, ``x + gain * norm(part(norm(x)))`` each.

    Attributes:
        hidden: D, width of the residual stream.
        gain: Factor of the outputs of mixer and MLP.
        scalar: Place within the layer of a scalar that multiplies its result; empty without one.
    """

    hidden: int
    mixer: Attention | DeltaNet
    mlp: GatedMLP | RoutedMLP
    around: Norms = BEFORE
    gain: float = 1.0
    scalar: str = ""

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """All products that are computed for every token, in their order."""
        return self.mixer.products(self.hidden) + self.mlp.products(self.hidden)

    @cached_property
    def summed(self) -> dict[str, tuple[int, ...]]:
        """Names of products whose partial sums are added up before another kernel reads them, with their
        linears' outputs: products followed by a norm of the whole, or with a bias other than q, k and v's."""
        whole = self.mixer.summed | self.mlp.summed
        parts = (self.mixer, self.around.behind_mixer), (self.mlp, self.around.behind_mlp)
        whole |= {part.products(self.hidden)[-1].name for part, norm in parts if norm}
        products = [product for product in self.products if product.name in whole]
        return {each.name: tuple(linear.outputs for linear in each.linears) for each in products}

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of all products."""
        return tuple(linear for product in self.products for linear in product.linears)

    @property
    def expert_products(self) -> tuple[Product, ...]:
        """The products of each expert; none without a mixture."""
        return self.mlp.of_expert(self.hidden) if isinstance(self.mlp, RoutedMLP) else ()

    @cached_property
    def expert_linears(self) -> tuple[Linear, ...]:
        """The linears of each expert."""
        return tuple(linear for product in self.expert_products for linear in product.linears)

    @property
    def matrices(self) -> Iterator[tuple[Linear, int]]:
        """Its linears, each with its count: 1, or the number of experts for a linear of an expert."""
        yield from ((linear, 1) for linear in self.linears)
        yield from ((linear, self.experts) for linear in self.expert_linears)

    @property
    def experts(self) -> int:
        """Number of its experts; 0 without a mixture."""
        return self.mlp.experts if isinstance(self.mlp, RoutedMLP) else 0

    @property
    def norms(self) -> int:
        """Elements of all norms."""
        return self.hidden * sum(map(bool, self.around)) + self.mixer.norms

    @property
    def dense(self) -> int:
        """Elements of 16-bit parameters other than `linears`, norms and biases."""
        gates = self.experts + (isinstance(self.mlp, RoutedMLP) and self.mlp.shared > 0)
        return self.mixer.dense(self.hidden) + gates * self.hidden

    @property
    def biases(self) -> int:
        """Elements of all biases."""
        router = self.mlp.experts if isinstance(self.mlp, RoutedMLP) and self.mlp.bias else 0
        return router + sum(count * linear.outputs for linear, count in self.matrices if linear.bias)


def names(places: tuple[str, ...]) -> tuple[str, ...]:
    """The last parts of qualified names."""
    return tuple(place.rpartition(".")[2] for place in places)


def _product(
    name: str, places: tuple[str, ...], outputs: tuple[int, ...], inputs: int, bias: bool
) -> Product:
    pairs = zip(places, outputs, strict=True)
    return Product(name, tuple(Linear(place, rows, inputs, bias) for place, rows in pairs))


FUSED = tuple(
    names(places)
    for kind in (Attention, DeltaNet, GatedMLP)
    for places in kind.PLACES.values()
    if len(places) > 1
)
"""Names of the linears that inference engines run as one matrix: q, k and v, the projections before a delta
rule, and gate and up."""
