"""Sizes of a decoder, from its config.json or by name, and the counts that follow from them.

Everything that counts parameters, bytes or products of a model starts here: the memory plan, the benchmarks
and their peers. Nothing here needs torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from qerl.errors import QeRLError
from qerl.families.layer import PRODUCTS


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
    """Linears on top of each other that multiply the same input: [outputs, inputs] all together."""

    name: str
    outputs: int
    inputs: int
    linears: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder whose layers are Llama's.

    Attributes:
        positions: Longest sequence.
        qkv_bias, o_bias, mlp_bias: Which projections have a bias.
        qk_norm: Whether heads of queries and keys are normalised.
        tied: Whether the output head is the embedding.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int = 32768
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Sizes":
        """Sizes from the content of a config.json; what it leaves out has the family's default.

        Raises:
            QeRLError: The family is not described (`qerl.families.table`), or a field makes no sense.
        """
        from transformers import AutoConfig

        from qerl.families.table import FAMILIES

        model_type = str(config.get("model_type"))
        if model_type not in FAMILIES:
            raise QeRLError(
                f"Memory is planned for the model families {', '.join(FAMILIES)}, not for {model_type}; "
                "docs/families.md says which others train, without a plan."
            )
        try:
            full = AutoConfig.for_model(**config)
        except Exception as error:  # given a file alone; the validators of fields have classes of their own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise QeRLError(
                f"The config.json of this {model_type} model is not valid ({reason.rstrip('.')}); mend it."
            ) from error
        check_counts(full)
        return cls.of(full)

    @classmethod
    def of(cls, config: Any) -> "Sizes":
        """Sizes from the config of a model of a described family, a ``transformers.PreTrainedConfig``."""
        from qerl.families.table import FAMILIES

        family = FAMILIES[config.model_type]
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            positions=positions_of(config) or 0,
            qkv_bias=attention_bias or family.qkv_bias,
            o_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=family.qk_norm,
            tied=config.tie_word_embeddings,
        )

    @classmethod
    def by_name(cls, name: str) -> "Sizes":
        """Sizes of the well-known model of this short name.

        Raises:
            QeRLError: `SIZES` has no such name.
        """
        if name not in SIZES:
            raise QeRLError(f"There are no sizes under the name {name!r}; known are {', '.join(SIZES)}.")
        return SIZES[name]

    @property
    def queries(self) -> int:
        """Q, the width of all query heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """G, the width of all key heads."""
        return self.kv_heads * self.head_size

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The seven linears of one decoder layer."""
        d, i, q, g = self.hidden, self.intermediate, self.queries, self.keys
        shapes = {
            "qkv": ((q, d), (g, d), (g, d)),
            "o": ((d, q),),
            "gate_up": ((i, d), (i, d)),
            "down": ((d, i),),
        }
        biases = {
            "qkv": self.qkv_bias, "o": self.o_bias, "gate_up": self.mlp_bias, "down": self.mlp_bias,
        }  # fmt: skip
        return tuple(
            Linear(place, outputs, inputs, biases[product])
            for product, places in PRODUCTS.items()
            for place, (outputs, inputs) in zip(places, shapes[product], strict=True)
        )

    @property
    def products(self) -> list[Product]:
        """The four products of one decoder layer."""
        linears = {linear.place: linear for linear in self.linears}
        return [
            Product(name, sum(linears[at].outputs for at in places), linears[places[0]].inputs, len(places))
            for name, places in PRODUCTS.items()
        ]

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return self.layers * sum(linear.elements for linear in self.linears) + self.dense_parameters

    @property
    def dense_parameters(self) -> int:
        """Parameters that stay in 16 bits: embedding, head, norms, biases."""
        biases = sum(linear.outputs for linear in self.linears if linear.bias)
        norms = 2 * self.hidden + (2 * self.head_size if self.qk_norm else 0)
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return tables + self.layers * (biases + norms) + self.hidden


def _qwen25(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool = False,
) -> Sizes:
    return Sizes(
        hidden, intermediate, layers, heads, kv_heads, 128, vocabulary, 32768, qkv_bias=True, tied=tied
    )


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool = False
) -> Sizes:
    return Sizes(
        hidden, intermediate, layers, heads, kv_heads, 128, 151936, positions=40960, qk_norm=True, tied=tied
    )


SIZES = {
    "1.5b": _qwen25(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3b": _qwen25(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7b": _qwen25(3584, 18944, 28, 28, 4, 152064),
    "14b": _qwen25(5120, 13824, 48, 40, 8, 152064),
    "32b": _qwen25(5120, 27648, 64, 40, 8, 152064),
    "72b": _qwen25(8192, 29568, 80, 64, 8, 152064),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8),
    "llama3-8b": Sizes(4096, 14336, 32, 32, 8, 128, 128256, positions=8192),
    "llama3-70b": Sizes(8192, 28672, 80, 64, 8, 128, 128256, positions=8192),
    "llama3.1-8b": Sizes(4096, 14336, 32, 32, 8, 128, 128256, positions=131072),
    "mistral-7b": Sizes(4096, 14336, 32, 32, 8, 128, 32768, positions=32768),
}
"""Well-known models: Qwen2.5 unless the name says otherwise; mistral-7b is version 0.3."""


def check_counts(config: Any) -> None:
    """Raise for a config with less than one of what every model has, layers and heads among them.

    Args:
        config: The config of the text model, a ``transformers.PreTrainedConfig``.

    Raises:
        QeRLError: A size, or the number of layers or heads, is below 1.
    """
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ):
        count = getattr(config, name, None)
        if isinstance(count, int) and count < 1:
            raise QeRLError(f"The config.json of this {config.model_type} model has {name} {count}; mend it.")


def positions_of(config: Any) -> int | None:
    """Positions that a model has; None where its config sets no limit.

    Where the rotary embedding is stretched from an original length, as YaRN's is, they are that length times
    the factor: Qwen2.5's configs keep the original one as max_position_embeddings.

    Args:
        config: The config of the text model, a ``transformers.PreTrainedConfig``.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if positions is None or not original or not factor or rope.get("rope_type") != "yarn":
        return positions
    return max(positions, int(original * factor))
