"""Phi-3 and Phi-4: one linear for q, k and v, one for gate and up; some models rotate a part of each head."""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary
from qerl.families.layer import GatedMLP
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
    mixer = attention(
        config, qkv_bias=False, o_bias=False, fused=True, window=config.sliding_window, rotary=rotary(config)
    )
    mlp = GatedMLP(config.intermediate_size, fused=True)
    return decoder(config, [layer(config, mixer, mlp)] * config.num_hidden_layers)
