"""Sizes of a decoder, from its config.json or by name, and the counts that follow from them.

Everything that counts parameters, bytes or products of a model starts here: the memory plan, the benchmarks
and their peers. Nothing here needs torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

from qerl.errors import QeRLError
from qerl.families.layer import Attention, DeltaNet, GatedMLP, LayerSpec, Rotary, RoutedMLP

FREQUENCIES = "rotary_emb.inv_freq"
"""Place in a decoder of its rotary frequencies, where all layers have the same."""


class Run(NamedTuple):
    """Equal neighbouring layers."""

    layers: int
    spec: LayerSpec


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
        runs: Its layers, in order.
        positions: Longest sequence.
        tied: True if the output head is the embedding.
        embedding_scale: Factor of embeddings, unless their own module applies it.
        logit_scale: Factor of logits.
        logit_cap: Bounds logits by tanh; None for no bound.
        unit_offset: True if an RMSNorm multiplies by 1 + weight.
    """

    vocabulary: int
    runs: tuple[Run, ...]
    positions: int = 32768
    tied: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    unit_offset: bool = False

    @classmethod
    def of_layers(cls, specs: Sequence[LayerSpec], **whole: Any) -> "Sizes":
        """Sizes of a decoder with these layers, and its other fields."""
        runs = tuple(Run(len(list(equal)), spec) for spec, equal in groupby(specs))
        return cls(runs=runs, **whole)

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
        """Sizes of a decoder of equal layers: attention with whole heads rotated, and SwiGLU."""
        rotary = Rotary(FREQUENCIES, head_size // 2, head_size // 2)
        norm: Literal["", "head"] = "head" if qk_norm else ""
        mixer = Attention(heads, kv_heads, head_size, qkv_bias, o_bias, norm, rotary=rotary)
        spec = LayerSpec(hidden, mixer, GatedMLP(intermediate, mlp_bias))
        return cls(vocabulary, (Run(layers, spec),), positions, tied)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Sizes":
        """Sizes from the content of a config.json; a missing field has the family's default.

        Raises:
            QeRLError: The family is not described (`qerl.families.table`), or a field makes no sense.
        """
        from transformers import AutoConfig

        from qerl.families.table import FAMILIES, why_not_described

        model_type = str(config.get("model_type"))
        if model_type not in FAMILIES:
            raise QeRLError(
                f"Memory is planned for the model families {', '.join(FAMILIES)}, not for {model_type}; "
                "docs/families.md says which others train, without a plan."
            )
        try:
            full = AutoConfig.for_model(**config)
        except Exception as error:  # only the file can be at fault, and validators raise their own classes
            reason = " ".join(str(error).split()) or type(error).__name__
            raise QeRLError(
                f"The config.json of this {model_type} model is not valid ({reason.rstrip('.')}); fix it."
            ) from error
        check_counts(full)
        if (why := why_not_described(full)) is not None:
            raise QeRLError(f"Memory is not planned for this {model_type} model: {why}.")
        return cls.of(full)

    @classmethod
    def of(cls, config: Any) -> "Sizes":
        """Sizes from the config of a model of a described family, a ``transformers.PreTrainedConfig``."""
        from qerl.families.table import FAMILIES

        return FAMILIES[config.model_type].sizes(config)

    @classmethod
    def by_name(cls, name: str) -> "Sizes":
        """Sizes of the well-known model of this short name.

        Raises:
            QeRLError: Neither `SIZES` nor `PUBLISHED` has this name.
        """
        if name in PUBLISHED:
            return cls.from_config(PUBLISHED[name])
        if name not in SIZES:
            known = ", ".join((*SIZES, *PUBLISHED))
            raise QeRLError(f"No sizes are known for the model {name!r}; known models are {known}.")
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
        """The description of all layers.

        Raises:
            QeRLError: Layers differ.
        """
        first, *others = {run.spec for run in self.runs}
        if others:
            raise QeRLError("The layers of this model differ; one description does not hold for all of them.")
        return first

    @property
    def attention(self) -> Attention:
        """The description of attention in all layers that have it.

        Raises:
            QeRLError: Layers have different attention, or none.
        """
        found = {run.spec.mixer for run in self.runs if isinstance(run.spec.mixer, Attention)}
        if len(found) != 1:
            raise QeRLError(f"This model has {len(found)} kinds of attention; what was asked takes one.")
        return found.pop()

    @property
    def mlp(self) -> GatedMLP | RoutedMLP:
        """The description of the MLP of all layers.

        Raises:
            QeRLError: MLPs differ.
        """
        first, *others = {run.spec.mlp for run in self.runs}
        if others:
            raise QeRLError("The MLPs of this model differ; one description does not hold for all of them.")
        return first

    @property
    def mixture(self) -> RoutedMLP | None:
        """The description of all mixtures; None without any.

        Raises:
            QeRLError: Mixtures differ.
        """
        found = {run.spec.mlp for run in self.runs if isinstance(run.spec.mlp, RoutedMLP)}
        if len(found) > 1:
            raise QeRLError("The mixtures of this model differ; one description does not hold for all.")
        return found.pop() if found else None

    @property
    def keys(self) -> int:
        """Elements of a token's keys in all layers; its values have as many."""
        mixers = [spec.mixer for spec in self.specs]
        return sum(each.keys for each in mixers if isinstance(each, Attention))

    @property
    def states(self) -> int:
        """Elements of a sequence's states in all layers that carry one."""
        mixers = [spec.mixer for spec in self.specs]
        return sum(each.state for each in mixers if isinstance(each, DeltaNet))

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
        elements = sum(run.layers * count * x.elements for run in self.runs for x, count in run.spec.matrices)
        return elements + self.dense_parameters

    @property
    def dense_parameters(self) -> int:
        """Parameters that stay in 16 bits: embedding, head, norms, biases, routers, and mixers' parameters
        beside linears."""
        biases = sum(run.layers * (run.spec.biases + run.spec.dense) for run in self.runs)
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
"""Well-known models like Llama: Qwen2.5 unless the name says otherwise; mistral-7b is version 0.3."""

_QWEN35_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
_QWEN36_27B = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "linear_num_value_heads": 48, "max_position_embeddings": 262144,
    "rope_parameters": _QWEN35_ROPE,
}  # fmt: skip

_GPT_OSS = {
    "model_type": "gpt_oss",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm3-3b": {
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 65536, "rope_theta": 5e6,
    },
    "ministral3-8b": {"model_type": "ministral3"},
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216,
        "tie_word_embeddings": True, "max_position_embeddings": 262144, "rope_parameters": _QWEN35_ROPE,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text", "max_position_embeddings": 262144, "rope_parameters": _QWEN35_ROPE,
    },
    "qwen3.6-27b": _QWEN36_27B,
    "qwen3.8-27b": _QWEN36_27B,
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe_text", "max_position_embeddings": 262144, "rope_parameters": _QWEN35_ROPE,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128,
        "norm_topk_prob": True, "max_position_embeddings": 40960, "rope_theta": 1e6,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS,
    "gemma4-31b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
"""Well-known models of other families by published config, without fields at transformers' defaults."""


def check_counts(config: Any) -> None:
    """Raise if a size in a text model's config, or its number of layers or heads, is below 1.

    Raises:
        QeRLError: A size, or the number of layers or heads, is below 1.
    """
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for name in sizes:
        count = getattr(config, name, None)
        if isinstance(count, int) and count < 1:
            raise QeRLError(f"The config.json of this {config.model_type} model has {name} {count}; fix it.")


def positions_of(config: Any) -> int | None:
    """Return the number of positions of a text model by its config; None if the config sets no limit.

    If YaRN stretches the rotary embedding from an original length, it is at least that length times the
    factor: Qwen2.5's configs keep the original length as max_position_embeddings.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    for rope in rope_parameters(config):
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if positions is not None and original and factor and rope.get("rope_type") == "yarn":
            positions = max(positions, int(original * factor))
    return positions


def rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a text model's rotary embeddings: one mapping, or one per type of layers."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in found.values() if isinstance(each, Mapping)]
    return nested or [found]
