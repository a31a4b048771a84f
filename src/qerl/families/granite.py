"""Granite: Llama with factors for embeddings, scores, what is added to the residual stream, and logits.

Granite SWA has windows in three of four layers, a sink per head, and a base of angles per layer, 0 for none.
"""

from typing import Any

from qerl.families.common import decoder, heads, layer, rotary, window
from qerl.families.layer import Attention, LayerSpec, Rotary
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """The decoder by its config."""
    return decoder(
        config,
        [_layer(config, index) for index in range(config.num_hidden_layers)],
        embedding_scale=config.embedding_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _layer(config: Any, index: int) -> LayerSpec:
    bias, slides = bool(config.attention_bias), None
    turned: Rotary | None = rotary(config)
    if config.model_type == "granite_swa":
        slides, bases = window(config, index), config.layer_rope_theta
        known = sorted({base for base in bases if base})
        base = bases[index]
        turned = rotary(config, f"rotary_embs.{known.index(base)}.inv_freq") if base else None
    mixer = Attention(
        *heads(config),
        qkv_bias=bias,
        o_bias=bias,
        window=slides,
        sinks=config.model_type == "granite_swa",
        rotary=turned,
        scale=config.attention_multiplier,
    )
    return layer(config, mixer, gain=config.residual_multiplier)
