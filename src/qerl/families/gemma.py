"""Gemma 3 and 4: five layers with a window to one without, norms before and after each part, GELU.

Gemma 3's norms multiply by 1 + weight, Gemma 4's do not. Gemma 4's layers without a window have wider heads,
a quarter of each rotated, fewer key heads, and may use the keys as values; values are normalised, and a
layer's result is multiplied by a scalar. The smallest Gemma 4 models add an embedding per layer, which no
kernel here computes, and use keys and values of other layers.
"""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.layer import SANDWICH, Attention, GatedMLP, LayerSpec, Rotary
from qerl.families.sizes import Sizes


def sizes3(config: Any) -> Sizes:
    """Return the decoder that a config of Gemma 3 describes."""
    mixers = [
        attention(
            config,
            qk_norm="head",
            window=window(config, index),
            rotary=rotary(config, f"rotary_emb.{kind}_inv_freq"),
            scale=config.query_pre_attn_scalar**-0.5,
        )
        for index, kind in enumerate(config.layer_types)
    ]
    cap = getattr(config, "final_logit_softcapping", None)
    return decoder(config, [_layer(config, mixer) for mixer in mixers], unit_offset=True, logit_cap=cap)


def sizes4(config: Any) -> Sizes:
    """Return the decoder that a config of Gemma 4 describes."""
    mixers = [_mixer4(config, index) for index in range(config.num_hidden_layers)]
    layers = [_layer(config, mixer, scalar="layer_scalar") for mixer in mixers]
    return decoder(config, layers, logit_cap=config.final_logit_softcapping)


def _mixer4(config: Any, index: int) -> Attention:
    own, kind = config.per_layer_config[index], config.layer_types[index]
    part, half = config.rope_parameters[kind].get("partial_rotary_factor", 1.0), own.head_dim // 2
    return attention(
        own,
        qk_norm="head",
        v_norm=True,
        k_is_v=config.attention_k_eq_v and kind != "sliding_attention",
        window=window(config, index),
        rotary=Rotary(f"rotary_emb.{kind}_inv_freq", int(part * half), half),
        scale=1.0,
    )


def _layer(config: Any, mixer: Attention, **fields: Any) -> LayerSpec:
    mlp = GatedMLP(config.intermediate_size, activation="gelu_tanh")
    return layer(config, mixer, mlp, around=SANDWICH, **fields)
