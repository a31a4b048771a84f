"""Sizes of a decoder, from its config.json or by name, and the counts that follow from them.

Everything that counts parameters, bytes or products of a model starts here: the memory plan, the benchmarks
and their peers. Nothing here needs torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from qerl.errors import QeRLError
from qerl.families.layer import Attention, LayerSpec, SwiGLU


class Run(NamedTuple):
    """Neighbouring layers that are equal."""

    layers: int
    spec: LayerSpec


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
        runs: Its layers, in order.
        positions: Longest sequence.
        tied: True if the output head is the embedding.
    """

    vocabulary: int
    runs: tuple[Run, ...]
    positions: int = 32768
    tied: bool = False

    @classmethod
    def uniform(
        cls,
        hidden: int,
        intermediate: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        vocabulary: int,
        positions: int = 32768,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        tied: bool = False,
    ) -> "Sizes":
        """Sizes of a decoder whose layers all are the same attention and SwiGLU."""
        mixer = Attention(heads, kv_heads, head_size, qkv_bias, o_bias, qk_norm)
        spec = LayerSpec(hidden, mixer, SwiGLU(intermediate, mlp_bias))
        return cls(vocabulary, (Run(layers, spec),), positions, tied)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Sizes":
        """Sizes from the content of a config.json; a missing field has the family's default.

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
                f"The config.json of this {model_type} model is not valid ({reason.rstrip('.')}); fix it."
            ) from error
        check_counts(full)
        return cls.of(full)

    @classmethod
    def of(cls, config: Any) -> "Sizes":
        """Sizes from the config of a model of a described family, a ``transformers.PreTrainedConfig``."""
        from qerl.families.table import FAMILIES

        family = FAMILIES[config.model_type]
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls.uniform(
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
    def layers(self) -> int:
        """Number of decoder layers."""
        return sum(run.layers for run in self.runs)

    @property
    def hidden(self) -> int:
        """D, width of the residual stream."""
        return self.runs[0].spec.hidden

    @property
    def spec(self) -> LayerSpec:
        """The description that all layers have.

        Raises:
            QeRLError: They differ.
        """
        first, *others = {run.spec for run in self.runs}
        if others:
            raise QeRLError("The layers of this model differ; one description does not hold for all of them.")
        return first

    @property
    def specs(self) -> list[LayerSpec]:
        """The description of each layer."""
        return [run.spec for run in self.runs for _ in range(run.layers)]

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the linears of decoder layers, as LoRA's targets are given."""
        return tuple(dict.fromkeys(linear.name for run in self.runs for linear in run.spec.linears))

    def with_layers(self, layers: int) -> "Sizes":
        """Sizes of a decoder with ``layers`` layers of the kind that all have."""
        return replace(self, runs=(Run(layers, self.spec),))

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        elements = sum(run.layers * linear.elements for run in self.runs for linear in run.spec.linears)
        return elements + self.dense_parameters

    @property
    def dense_parameters(self) -> int:
        """Parameters that stay in 16 bits: embedding, head, norms, biases."""
        biases = sum(run.layers * run.spec.biases for run in self.runs)
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + biases + self.norms

    @property
    def norms(self) -> int:
        """Elements of all norms, the final one among them."""
        return sum(run.layers * run.spec.norms for run in self.runs) + self.hidden


_QWEN25: dict[str, Any] = {"qkv_bias": True, "positions": 32768}
_QWEN3: dict[str, Any] = {"qk_norm": True, "positions": 40960}
SIZES = {
    "1.5b": Sizes.uniform(1536, 8960, 28, 12, 2, 128, 151936, **_QWEN25, tied=True),
    "3b": Sizes.uniform(2048, 11008, 36, 16, 2, 128, 151936, **_QWEN25, tied=True),
    "7b": Sizes.uniform(3584, 18944, 28, 28, 4, 128, 152064, **_QWEN25),
    "14b": Sizes.uniform(5120, 13824, 48, 40, 8, 128, 152064, **_QWEN25),
    "32b": Sizes.uniform(5120, 27648, 64, 40, 8, 128, 152064, **_QWEN25),
    "72b": Sizes.uniform(8192, 29568, 80, 64, 8, 128, 152064, **_QWEN25),
    "qwen3-4b": Sizes.uniform(2560, 9728, 36, 32, 8, 128, 151936, **_QWEN3, tied=True),
    "qwen3-8b": Sizes.uniform(4096, 12288, 36, 32, 8, 128, 151936, **_QWEN3),
    "qwen3-14b": Sizes.uniform(5120, 17408, 40, 40, 8, 128, 151936, **_QWEN3),
    "qwen3-32b": Sizes.uniform(5120, 25600, 64, 64, 8, 128, 151936, **_QWEN3),
    "llama3-8b": Sizes.uniform(4096, 14336, 32, 32, 8, 128, 128256, positions=8192),
    "llama3-70b": Sizes.uniform(8192, 28672, 80, 64, 8, 128, 128256, positions=8192),
    "llama3.1-8b": Sizes.uniform(4096, 14336, 32, 32, 8, 128, 128256, positions=131072),
    "mistral-7b": Sizes.uniform(4096, 14336, 32, 32, 8, 128, 32768, positions=32768),
}
"""Well-known models: Qwen2.5 unless the name says otherwise; mistral-7b is version 0.3."""


def check_counts(config: Any) -> None:
    """Raise for a text model's config with less than one of what every model has, layers and heads among
    them.

    Raises:
        QeRLError: A size, or the number of layers or heads, is below 1.
    """
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for name in sizes:
        count = getattr(config, name, None)
        if isinstance(count, int) and count < 1:
            raise QeRLError(f"The config.json of this {config.model_type} model has {name} {count}; fix it.")


def positions_of(config: Any) -> int | None:
    """Positions of a text model by its config; None where that sets no limit.

    Where the rotary embedding is stretched from an original length, as YaRN's is, they are that length times
    the factor: Qwen2.5's configs keep the original one as max_position_embeddings.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if positions is None or not original or not factor or rope.get("rope_type") != "yarn":
        return positions
    return max(positions, int(original * factor))
