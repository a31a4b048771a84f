"""Helpers shared by the files of families, for config fields that mean the same in all of them."""

from typing import Any

from qerl.families.layer import Attention, DeltaNet, GatedMLP, LayerSpec, Rotary, RoutedMLP
from qerl.families.sizes import FREQUENCIES, Sizes, positions_of


def head_size(config: Any) -> int:
    """Width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary(config: Any, frequencies: str = FREQUENCIES) -> Rotary:
    """Return the rotary embedding of a head's first dimensions, as many as the config says, in two halves."""
    parameters = getattr(config, "rope_parameters", None) or {}
    turned = int(head_size(config) * (parameters.get("partial_rotary_factor") or 1.0))
    return Rotary(frequencies, turned // 2, turned // 2)


def window(config: Any, layer: int) -> int | None:
    """Return the window of a layer according to ``layer_types``; None for full attention."""
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


def attention(config: Any, **fields: Any) -> Attention:
    """Return attention with these fields; heads and biases default to those of the config."""
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
    """Return a layer with this mixer; its MLP defaults to the config's SwiGLU."""
    mlp = mlp or GatedMLP(config.intermediate_size, bool(getattr(config, "mlp_bias", False)))
    return LayerSpec(config.hidden_size, mixer, mlp, **fields)


def decoder(config: Any, layers: list[LayerSpec], **fields: Any) -> Sizes:
    """Return the decoder with these layers."""
    return Sizes.of_layers(
        layers,
        vocabulary=config.vocab_size,
        positions=positions_of(config) or 0,
        tied=config.tie_word_embeddings,
        **fields,
    )
