"""Qwen3.5, 3.6 and 3.8: three of four layers are gated delta nets, every fourth has gated attention.

Attention gates each head by the second half of its query's projection, normalises queries and keys, and
rotates a quarter of each head. A token has three positions, for text, height and width; on text they are
equal. All norms but that of a delta net's output multiply by 1 + w. Models with experts have them in all
layers, beside a shared expert.
"""

from typing import Any

from qerl.families.common import attention, decoder, layer, rotary
from qerl.families.layer import DeltaNet, RoutedMLP
from qerl.families.sizes import Sizes


def sizes(config: Any) -> Sizes:
    """Return the decoder that a config describes."""
    delta_net = DeltaNet(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    full = attention(config, qk_norm="head", gated=True, rotary=rotary(config))
    mixers = [delta_net if kind == "linear_attention" else full for kind in config.layer_types]
    mlp = None
    if config.model_type == "qwen3_5_moe_text":
        mlp = RoutedMLP(
            config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok, normalized=True,
            shared=config.shared_expert_intermediate_size,
        )  # fmt: skip
    return decoder(config, [layer(config, mixer, mlp) for mixer in mixers], unit_offset=True)
