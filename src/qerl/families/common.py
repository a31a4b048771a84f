"""What the files of families share: fields of a config that mean the same in all of them."""

from typing import Any

from qerl.families.layer import Attention, DeltaNet, GatedMLP, LayerSpec, Rotary, RoutedMLP
from qerl.families.sizes import FREQUENCIES, Sizes, positions_of


def head_size(config: Any) -> int:
    """Width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary(config: Any, frequencies: str = FREQUENCIES) -> Rotary:
    """The first numbers of a head turned in two halves, as many as the config says."""
    parameters = getattr(config, "rope_parameters", None) or {}
    turned = int(head_size(config) * (parameters.get("partial_rotary_factor") or 1.0))
    return Rotary(frequencies, turned // 2, turned // 2)


def window(config: Any, layer: int) -> int | None:
    """The window of a layer by ``layer_types``."""
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


def attention(config: Any, **fields: Any) -> Attention:
    """Attention with these fields; unless given, heads and biases are those of the config."""
    bias = bool(getattr(config, "attention_bias", False))
    own = {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_size": head_size(config),
        "qkv_bias": bias,
        "o_bias": bias,
    }
    return Attention(**own | fields)


def layer(
    config: Any, mixer: Attention | DeltaNet, mlp: GatedMLP | RoutedMLP | None = None, **fields: Any
) -> LayerSpec:
    """A layer with this mixer and, unless given, a SwiGLU by the config."""
    mlp = mlp or GatedMLP(config.intermediate_size, bool(getattr(config, "mlp_bias", False)))
    return LayerSpec(config.hidden_size, mixer, mlp, **fields)


def decoder(config: Any, layers: list[LayerSpec], **fields: Any) -> Sizes:
    """The decoder of these layers."""
    return Sizes.of_layers(
        layers,
        vocabulary=config.vocab_size,
        positions=positions_of(config) or 0,
        tied=config.tie_word_embeddings,
        **fields,
    )
