"""Ministral 3: Llama with YaRN, and queries scaled up with their position."""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary
from qerl.families.layer import PositionScale
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
    rope = config.rope_parameters
    beta = rope.get("llama_4_scaling_beta")
    scale = PositionScale(beta, rope["original_max_position_embeddings"]) if beta else None
    mixer = attention(config, window=config.sliding_window, rotary=rotary(config), position_scale=scale)
    return decoder(config, [layer(config, mixer)] * config.num_hidden_layers)
