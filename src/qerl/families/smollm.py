"""SmolLM3: Llama in which some layers (every fourth of the published model) have no rotary embedding."""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
    mixers = [
        attention(
            config,
            window=window(config, index) if config.use_sliding_window else None,
            rotary=rotary(config) if turned else None,
        )
        for index, turned in enumerate(config.no_rope_layers)
    ]
    return decoder(config, [layer(config, mixer) for mixer in mixers])
