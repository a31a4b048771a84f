"""Configs of models of given sizes, for random models and for the folders that other libraries load."""

from dataclasses import replace
from typing import Any

from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from qerl.families.sizes import PUBLISHED, Sizes
from qerl.fp4.checkpoint import quantization_config
from qerl.fp4.format import NVFP4


def shape_of(name: str, layers: int = 0) -> "Sizes | PreTrainedConfig":
    """Return the shape of a well-known model by its short name, for `qerl.measure.random_model`.

    Args:
        name: Name in `SIZES` or `PUBLISHED`.
        layers: Number of layers to keep, from the first; 0 for all.
    """
    if name not in PUBLISHED:
        sizes = Sizes.by_name(name)
        return sizes.with_layers(layers) if layers else sizes
    cut = {"num_hidden_layers": layers} if layers else {}
    return AutoConfig.for_model(**PUBLISHED[name] | cut)


def declared(name: str) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a well-known model, or None."""
    return PUBLISHED.get(name, {}).get("quantization_config")


def sizes_of(shape: "Sizes | PreTrainedConfig") -> Sizes:
    """Return the sizes of the random model of a shape; a model given by sizes never ties its embeddings."""
    return replace(shape, tied=False) if isinstance(shape, Sizes) else Sizes.of(shape)


def model_config(sizes: Sizes, weights: str, positions: int) -> PreTrainedConfig:
    """The `config.json` of a shape.

    Args:
        sizes: The shape, of a decoder like Llama's: biases on q, k and v make it a Qwen2, norms of q and k a
            Qwen3, neither a Llama.
        weights: ``bf16`` or ``nvfp4``, the latter as compressed-tensors declares it.
        positions: Positions of the model.
    """
    mixer = sizes.attention
    kind = Qwen2Config if mixer.qkv_bias else Qwen3Config if mixer.qk_norm else LlamaConfig
    quantised = {} if weights == "bf16" else {"quantization_config": quantization_config(NVFP4, ["lm_head"])}
    return kind(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.spec.mlp.intermediate,
        num_hidden_layers=sizes.layers, num_attention_heads=mixer.heads,
        num_key_value_heads=mixer.kv_heads, head_dim=mixer.head_size, max_position_embeddings=positions,
        tie_word_embeddings=False, rms_norm_eps=1e-6, dtype="bfloat16", eos_token_id=None,
        architectures=[kind.__name__.replace("Config", "ForCausalLM")], **quantised,
    )  # fmt: skip
