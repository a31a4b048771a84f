"""OLMo 3: norms after attention and MLP and none before them; one norm over all query heads, one over all key
heads."""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.layer import BEHIND
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
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
