"""Decoder layers as descriptions: a mixer of tokens, an MLP behind it, and the linears of both.

A layer adds ``mixer(norm(x))`` to its input and then ``mlp(norm(x))`` to that. `Attention` and `SwiGLU` are
the kinds of the described families; each lists its products. Four-bit scales, LoRA, memory plan and paged
engine read linears and products from here, so a further kind is a class here and a function in each of them:
a delta net is a mixer beside `Attention`, routed experts stand beside `SwiGLU`. A difference between layers
of one model, such as a window, sinks, the size of heads or no rotary embedding, is a field of their kind; a
layer that is a mixer or an MLP alone leaves out the other.

Nothing here needs torch.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
        """The last part of its name, as LoRA's targets are given."""
        return self.place.rpartition(".")[2]

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


@dataclass(frozen=True)
class Attention:
    """Softmax attention of several query heads per key head, with rotary embedding of whole heads.

    Attributes:
        qkv_bias, o_bias: Which projections have a bias.
        qk_norm: True if heads of queries and keys are normalised.
    """

    heads: int
    kv_heads: int
    head_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    PLACES: ClassVar[Places] = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
    }

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
        return 2 * self.head_size if self.qk_norm else 0

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Its products in the order in which they are computed, for inputs of this width."""
        q, g = self.queries, self.keys
        return (
            _product("qkv", self.PLACES, (q, g, g), hidden, self.qkv_bias),
            _product("o", self.PLACES, (hidden,), q, self.o_bias),
        )


@dataclass(frozen=True)
class SwiGLU:
    """A gated MLP: ``down(silu(gate x) * up x)``."""

    intermediate: int
    bias: bool = False

    PLACES: ClassVar[Places] = {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Its products in the order in which they are computed, for inputs of this width."""
        i = self.intermediate
        return (
            _product("gate_up", self.PLACES, (i, i), hidden, self.bias),
            _product("down", self.PLACES, (hidden,), i, self.bias),
        )


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: a mixer and an MLP on a residual stream, with an RMSNorm in front of each.

    Attributes:
        hidden: D, width of the residual stream.
    """

    hidden: int
    mixer: Attention
    mlp: SwiGLU

    @property
    def products(self) -> tuple[Product, ...]:
        """All products, in the order in which they are computed."""
        return self.mixer.products(self.hidden) + self.mlp.products(self.hidden)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of all products."""
        return tuple(linear for product in self.products for linear in product.linears)

    @property
    def norms(self) -> int:
        """Elements of all norms."""
        return 2 * self.hidden + self.mixer.norms

    @property
    def biases(self) -> int:
        """Elements of all biases."""
        return sum(linear.outputs for linear in self.linears if linear.bias)


def names(places: tuple[str, ...]) -> tuple[str, ...]:
    """The last parts of qualified names."""
    return tuple(place.rpartition(".")[2] for place in places)


def _product(name: str, places: Places, outputs: tuple[int, ...], inputs: int, bias: bool) -> Product:
    pairs = zip(places[name], outputs, strict=True)
    return Product(name, tuple(Linear(place, rows, inputs, bias) for place, rows in pairs))


FUSED = tuple(
    names(places) for kind in (Attention, SwiGLU) for places in kind.PLACES.values() if len(places) > 1
)
"""Names of the linears that inference engines run as one matrix: q, k and v, and gate and up."""
