"""Granite: Llama with factors for embeddings, scores, additions to the residual stream, and logits.

Granite SWA has windows in three of four layers, a sink per head, and a rotary base per layer, 0 for no rotary
embedding.
"""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.layer import LayerSpec
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
    return decoder(
        config,
        [_layer(config, index) for index in range(config.num_hidden_layers)],
        embedding_scale=config.embedding_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _layer(config: Any, index: int) -> LayerSpec:
    if config.model_type == "granite":
        mixer = attention(config, rotary=rotary(config), scale=config.attention_multiplier)
    else:
        bases = config.layer_rope_theta
        known, base = sorted({base for base in bases if base}), bases[index]
        mixer = attention(
            config,
            window=window(config, index),
            sinks=True,
            rotary=rotary(config, f"rotary_embs.{known.index(base)}.inv_freq") if base else None,
            scale=config.attention_multiplier,
        )
    return layer(config, mixer, gain=config.residual_multiplier)
