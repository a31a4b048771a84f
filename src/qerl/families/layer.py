"""Decoder layers as descriptions: a mixer of tokens, an MLP behind it, and the linears and norms of both.

`Attention`, `DeltaNet`, `GatedMLP` and `RoutedMLP` are the kinds of the described families; each lists its
products. Four-bit scales, LoRA, memory plan and paged engine read linears and products from here, so a
further kind is a class here and a function in each of them. A difference between layers of one model, such as
a window, sinks, the size of heads or no rotary embedding, is a field of their kind; a layer that is a mixer
or an MLP alone leaves out the other.

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
        """The last part of its name, as LoRA's targets are given; of shared experts with their module's, for
        other experts have linears of the same last names."""
        words = self.place.split(".")
        return ".".join(words[-2 if "shared_expert" in words else -1 :])

    def is_target(self, targets: Collection[str]) -> bool:
        """Whether one of LoRA's targets, names or ends of names, is this linear's."""
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
    """Which numbers of a head are turned, and from where the angles come.

    Number ``i`` is turned with number ``i + stride``, for every ``i`` below ``pairs``; the others stay as
    they are. A part of a head has ``pairs == stride``; what transformers calls proportional has the stride of
    a whole head.

    Attributes:
        frequencies: Place in the decoder of the angle per position of each pair.
    """

    frequencies: str
    pairs: int
    stride: int

    @property
    def scaling(self) -> str:
        """Place of the number that cosine and sine are multiplied by."""
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
        gated: True if the projection of queries gives each head a gate behind its query, by whose sigmoid the
            head's output is multiplied.
        window: Number of tokens that a token attends to, itself included; None for all before it.
        sinks: True if each query head has a logit that takes part in the softmax and has no value.
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
        """Elements of what stays in 16 bits beside linears and norms, for inputs of this width."""
        return self.heads if self.sinks else 0

    @property
    def summed(self) -> set[str]:
        """Products that are added up before anything reads them."""
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
    """A gated delta rule: each value head has a state S, which every token reads and corrects.

    A short causal convolution goes over queries, keys and values. Then, with q and k of length 1,
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
        """C, queries, keys and values of all heads: what the convolution goes over."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def values(self) -> int:
        """Values of all heads, as many as its output has."""
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
        """Elements of two numbers per value head, and of the convolution."""
        return 2 * self.value_heads + self.channels * self.taps

    def dense(self, hidden: int) -> int:
        """Elements of what stays in 16 bits beside linears and norms."""
        return self.gates(hidden) + self.constants

    @property
    def summed(self) -> set[str]:
        """Products that are added up before anything reads them."""
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
        activation: SwiGLU has ``silu``; ``gelu_tanh`` is GELU by its approximation with tanh.
        fused: True if one linear, `JOINED`, makes both.
    """

    intermediate: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    fused: bool = False

    PLACES: ClassVar[Places] = {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
    JOINED: ClassVar[str] = "mlp.gate_up_proj"

    @property
    def inner(self) -> int:
        """Numbers between its products, which are computed for all tokens."""
        return self.intermediate

    @property
    def summed(self) -> set[str]:
        """Products that are added up before anything reads them."""
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
    """An expert's inner activation ``(up + 1) gate sigmoid(slope gate)``, of a gate that is ``limit`` at most
    and an up between that and its negative."""

    slope: float
    limit: float


@dataclass(frozen=True)
class RoutedMLP:
    """A mixture: each token goes through some of several gated MLPs, whose results are added by weight.

    The router is a linear of one output per expert, in 16 bits and without an adapter, with a softmax over
    all experts. Experts are described by one of them (`of_expert`): their products are not computed for all
    tokens, as those of `LayerSpec.products` are.

    Attributes:
        intermediate: I of an expert.
        experts: E.
        chosen: Experts per token.
        normalized: True if the weights of a token's experts add up to 1, else they are the softmax's.
        bias: True if router and experts have biases.
        clamp: What stands between an expert's products; None for ``silu(gate) up``.
        router: Place of the router.
        shared: Intermediate size of a gated MLP that all tokens go through beside their experts, by the
            sigmoid of a linear of one output; 0 without one.
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
        """Numbers between its products that are computed for all tokens."""
        return self.shared

    @property
    def summed(self) -> set[str]:
        """Products that are added up before anything reads them."""
        return set()

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Those of the shared MLP: no linear of an expert is computed for all tokens."""
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
        gain: What the output of mixer and MLP is multiplied by.
        scalar: Place within the layer of a number that its result is multiplied by; empty without one.
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
        """Products that are added up before anything reads them, with the outputs of their linears: what has
        a norm of the whole behind it, or a bias elsewhere than at q, k and v."""
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
        """Its linears, and how many there are of each: as many of an expert's as there are experts."""
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
        """Elements of what stays in 16 bits beside linears, norms and biases."""
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
"""Names of the linears that inference engines run as one matrix: q, k and v, those in front of a delta rule,
and gate and up."""
