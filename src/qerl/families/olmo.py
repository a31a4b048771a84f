"""OLMo 3: norms behind attention and MLP and none before them, and all heads of queries, and of keys,
normalised together."""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.layer import BEHIND
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """The decoder by its config."""
    mixers = [
        attention(
            config,
            qk_norm="all",
            window=window(config, index),
            rotary=rotary(config, f"rotary_emb.{kind}_inv_freq"),
        )
        for index, kind in enumerate(config.layer_types)
    ]
    return decoder(config, [layer(config, mixer, around=BEHIND) for mixer in mixers])
