"""gpt-oss: windows in every second layer, a sink for each query head, and experts with biases in all layers.

Router, experts and attention have biases. An expert's gate is clamped from above and its up from both sides,
and 1 is added to the up. Published checkpoints hold experts in MXFP4 and all else in 16 bits.
"""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.layer import Clamp, RoutedMLP
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
    # Older versions of transformers have these numbers only in the model's code.
    clamp = Clamp(getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0))
    mlp = RoutedMLP(
        config.intermediate_size, config.num_local_experts, config.num_experts_per_tok, normalized=True,
        bias=True, clamp=clamp, router="mlp.router",
    )  # fmt: skip
    mixers = [
        attention(config, sinks=True, rotary=rotary(config), window=window(config, index))
        for index in range(config.num_hidden_layers)
    ]
    return decoder(config, [layer(config, mixer, mlp) for mixer in mixers])
