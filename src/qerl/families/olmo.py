"""OLMo 3: norms behind attention and MLP and none before them, and all heads of queries, and of keys,
normalised together."""

from typing import Any

from qerl.families.common import decoder, heads, layer, rotary, window
from qerl.families.layer import BEHIND, Attention
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """The decoder by its config."""
    bias = bool(config.attention_bias)
    layers = [
        layer(
            config,
            Attention(
                *heads(config),
                qkv_bias=bias,
                o_bias=bias,
                qk_norm="all",
                window=window(config, index),
                rotary=rotary(config, f"rotary_emb.{kind}_inv_freq"),
            ),
            around=BEHIND,
        )
        for index, kind in enumerate(config.layer_types)
    ]
    return decoder(config, layers)
