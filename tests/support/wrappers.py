"""Tiny random models for images whose text decoder is one part: the classes as which models are published."""

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from tests.support.models import TINY

TEXT = TINY | {"max_position_embeddings": 64, "bos_token_id": 2}
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_SIGHT = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2]}
DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": MROPE
    | {"partial_rotary_factor": 0.5, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
}
WRAPPERS = {
    "Gemma3": {
        "text_config": TEXT | WINDOWS | {"query_pre_attn_scalar": 16},
        "vision_config": SIGHT,
        "mm_tokens_per_image": 4,
    },
    "Gemma4": {"text_config": TEXT | WINDOWS | GEMMA4, "vision_config": SIGHT, "audio_config": None},
    "Mistral3": {
        "text_config": TEXT | {"model_type": "ministral3", "rope_parameters": YARN},
        "vision_config": SIGHT | {"model_type": "pixtral"},
    },
    "Qwen2_5_VL": {
        "text_config": TEXT | {"rope_parameters": MROPE | {"rope_type": "mrope", "type": "mrope"}},
        "vision_config": QWEN_SIGHT | {"intermediate_size": 64, "fullatt_block_indexes": [0]},
    },
    "Qwen3_5": {"text_config": TEXT | DELTA_NETS, "vision_config": QWEN_SIGHT},
    "Qwen3VL": {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": QWEN_SIGHT},
}
CAUSAL = {
    "Gemma3": "Gemma3ForCausalLM",
    "Gemma4": "Gemma4ForCausalLM",
    "Mistral3": "Ministral3ForCausalLM",
    "Qwen2_5_VL": "Qwen2ForCausalLM",
    "Qwen3_5": "Qwen3_5ForCausalLM",
    "Qwen3VL": "Qwen3ForCausalLM",
}


def make_wrapper(family: str, tied: bool = True, **text) -> PreTrainedModel:
    """fp32, in eval mode; norms and biases of its text decoder are random too."""
    settings = WRAPPERS[family] | {"tie_word_embeddings": tied}
    settings = settings | {"text_config": settings["text_config"] | text}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def text_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of texts alone."""
    return model(input_ids=ids, use_cache=False).logits
