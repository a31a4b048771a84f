"""Tiny random models of the described families.

Each has four layers, of every kind that its family has, and what tells the family from Llama is set to a
value that shows: a window shorter than a test's samples, norms and sinks that are not what they start as.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qerl.families.experts import separate_experts
from tests.support.models import TINY

WINDOW = 8
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "initializer_range": 0.05,  # at 0.2 transformers' own FP32 is off by up to 4e-4
    },
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
    },
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    "gemma4_text": {
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
    },
    "ministral3": {"rope_parameters": _YARN, "max_position_embeddings": 64},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "olmo3": {"sliding_window": WINDOW},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
        "initializer_range": 0.1,  # at 0.2 transformers' own FP32 is off by up to 2e-5
    },
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "initializer_range": 0.05,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _ALTERNATING,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "swiglu_limit": 0.7,  # within what its gates and ups are here
        "initializer_range": 0.1,
    },
    "granite_swa": {
        "sliding_window": WINDOW,
        "layer_rope_theta": [0, 1e4, 1e4, 1e5],
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
    },
}
NAMES = tuple(_SETTINGS)
"""Every ``model_type`` that `tiny` knows."""

DELTA_NETS = "qwen3_5_text"
MIXTURE = "qwen3_moe"
MIXTURES = (MIXTURE, "gpt_oss")


def tiny(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in FP32 and eval mode: 4 layers, hidden 64, heads of 16, vocabulary 128.

    Args:
        model_type: One of `NAMES`.
        seed: Of its weights.
        overrides: Fields of its config.
    """
    settings = TINY | {"num_hidden_layers": 4, "max_position_embeddings": 512} | _SETTINGS[model_type]
    config = AutoConfig.for_model(model_type, **(settings | overrides))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = _separated(AutoModelForCausalLM.from_config(config)).float().eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # around what it starts as: 1, or 0 where 1 is added
                parameter += 0.2 * torch.randn_like(parameter)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("sinks"):
                parameter.normal_()
            elif name.endswith("A_log"):  # some heads forget at once, others hardly
                parameter.uniform_(-6, 1)
            elif name.endswith("conv1d.weight"):
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def _separated(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its experts as they are once it is loaded: linears of their own."""
    for module in model.modules():
        if hasattr(module, "limit"):  # which older versions of transformers do not take from the config
            module.limit = model.config.swiglu_limit
    merged = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"}
    separate_experts(model)
    for name, module in merged.items():
        for number, expert in enumerate(model.get_submodule(name)):
            for linear, tensors in of_expert(module, number).items():
                for kind, tensor in tensors.items():
                    setattr(getattr(expert, linear), kind, torch.nn.Parameter(tensor.detach().clone()))
    return model


def of_expert(merged: Any, number: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weight and bias of each linear of an expert of transformers' module, views of its parameters."""
    alternate, transposed = not merged.is_concatenated, merged.is_transposed
    found: dict[str, dict[str, torch.Tensor]] = {"gate_proj": {}, "up_proj": {}, "down_proj": {}}
    for kind, end in (("weight", ""), ("bias", "_bias")):
        if kind == "bias" and not merged.has_bias:
            continue
        gate_up, down = (getattr(merged, f"{name}_proj{end}")[number] for name in ("gate_up", "down"))
        if kind == "weight" and transposed:
            gate_up, down = gate_up.T, down.T
        half = len(gate_up) // 2
        found["gate_proj"][kind] = gate_up[0::2] if alternate else gate_up[:half]
        found["up_proj"][kind] = gate_up[1::2] if alternate else gate_up[half:]
        found["down_proj"][kind] = down
    return found
