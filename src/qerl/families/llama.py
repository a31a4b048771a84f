"""Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE: GQA, whole heads rotated, SwiGLU, norms before each part.

Qwen2 has biases on q, k and v whatever its config says, Qwen3 and Qwen3-MoE norms of query and key heads.
Mistral and Qwen3-MoE have their window in all layers, Qwen2 and Qwen3 only in layers from
``max_window_layers`` on, and only if ``use_sliding_window`` is true. Llama's code ignores any window in its
config. Qwen3-MoE has experts instead of SwiGLU in most layers.
"""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary, window
from qerl.families.layer import LayerSpec, RoutedMLP
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
    return decoder(config, [_layer(config, index) for index in range(config.num_hidden_layers)])


def _layer(config: Any, index: int) -> LayerSpec:
    kind = config.model_type
    fields: dict[str, Any] = {"rotary": rotary(config)}
    if kind in ("mistral", "qwen3_moe"):
        fields["window"] = config.sliding_window
    if kind in ("qwen2", "qwen3"):
        fields["window"] = window(config, index)
    if kind == "qwen2":
        fields["qkv_bias"] = True
    if kind in ("qwen3", "qwen3_moe"):
        fields["qk_norm"] = "head"
    return layer(config, attention(config, **fields), _mixture(config, index))


def _mixture(config: Any, index: int) -> RoutedMLP | None:
    """Return the experts of a layer of Qwen3-MoE; None if the layer has a SwiGLU."""
    if config.model_type != "qwen3_moe" or index in config.mlp_only_layers:
        return None
    if not config.num_experts or (index + 1) % config.decoder_sparse_step:
        return None
    return RoutedMLP(
        config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
    )
