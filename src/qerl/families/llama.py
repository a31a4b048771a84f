"""Llama, Mistral, Qwen2 and Qwen3: grouped queries, whole heads turned, SwiGLU, a norm before each part.

Qwen2 has biases on q, k and v whatever its config says, Qwen3 norms of query and key heads. Mistral has its
window in all layers, Qwen in those from ``max_window_layers`` on, and only if ``use_sliding_window`` is true.
"""

from typing import Any

from qerl.families.common import decoder, heads, layer, rotary, window
from qerl.families.layer import Attention, LayerSpec
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """The decoder by its config."""
    return decoder(config, [_layer(config, index) for index in range(config.num_hidden_layers)])


def _layer(config: Any, index: int) -> LayerSpec:
    kind, bias = config.model_type, bool(getattr(config, "attention_bias", False))
    slides = None  # what a Llama's config may say of windows, its code does not read
    if kind != "llama":
        slides = config.sliding_window if kind == "mistral" else window(config, index)
    mixer = Attention(
        *heads(config),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        qk_norm="head" if kind == "qwen3" else "",
        window=slides,
        rotary=rotary(config),
    )
    return layer(config, mixer)
