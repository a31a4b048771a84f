"""Llama, Mistral, Qwen2 and Qwen3: grouped queries, whole heads turned, SwiGLU, a norm before each part.

Qwen2 has biases on q, k and v whatever its config says, Qwen3 norms of query and key heads. Mistral has its
window in all layers, Qwen in those from ``max_window_layers`` on, and only if ``use_sliding_window`` is true.
What a Llama's config may say of windows its code does not read.
"""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.layer import LayerSpec
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """The decoder by its config."""
    return decoder(config, [_layer(config, index) for index in range(config.num_hidden_layers)])


def _layer(config: Any, index: int) -> LayerSpec:
    kind = config.model_type
    fields: dict[str, Any] = {"rotary": rotary(config)}
    if kind == "mistral":
        fields["window"] = config.sliding_window
    if kind in ("qwen2", "qwen3"):
        fields["window"] = window(config, index)
    if kind == "qwen2":
        fields["qkv_bias"] = True
    if kind == "qwen3":
        fields["qk_norm"] = "head"
    return layer(config, attention(config, **fields))
