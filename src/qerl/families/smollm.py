"""SmolLM3: Llama with layers that have no rotary embedding, every fourth of the published model."""

from typing import Any

from qerl.families.common import decoder, heads, layer, rotary, window
from qerl.families.layer import Attention
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """The decoder by its config."""
    bias = bool(config.attention_bias)
    mixers = [
        Attention(
            *heads(config),
            qkv_bias=bias,
            o_bias=bias,
            window=window(config, index) if config.use_sliding_window else None,
            rotary=rotary(config) if config.no_rope_layers[index] else None,
        )
        for index in range(config.num_hidden_layers)
    ]
    return decoder(config, [layer(config, mixer) for mixer in mixers])
