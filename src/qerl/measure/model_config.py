"""The config of a model of given sizes, for our own random models and for the folders that peers load."""

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from qerl.families.sizes import Sizes
from qerl.fp4.checkpoint import quantization_config
from qerl.fp4.format import NVFP4


def model_config(sizes: Sizes, weights: str, positions: int) -> PreTrainedConfig:
    """The `config.json` of a shape.

    Args:
        sizes: The shape. Biases on q, k and v make it a Qwen2, norms of q and k a Qwen3, neither a Llama.
        weights: ``bf16`` or ``nvfp4``, the latter as compressed-tensors declares it.
        positions: Positions of the model.
    """
    mixer = sizes.spec.mixer
    kind = Qwen2Config if mixer.qkv_bias else Qwen3Config if mixer.qk_norm else LlamaConfig
    quantised = {} if weights == "bf16" else {"quantization_config": quantization_config(NVFP4, ["lm_head"])}
    return kind(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.spec.mlp.intermediate,
        num_hidden_layers=sizes.layers, num_attention_heads=mixer.heads,
        num_key_value_heads=mixer.kv_heads, head_dim=mixer.head_size, max_position_embeddings=positions,
        tie_word_embeddings=False, rms_norm_eps=1e-6, dtype="bfloat16", eos_token_id=None,
        architectures=[kind.__name__.replace("Config", "ForCausalLM")], **quantised,
    )  # fmt: skip
