"""A policy of a shape with random weights in a format, made on the GPU layer by layer.

No more memory is taken than the weights need in the end, so a shape of 72B can be made where it can be
trained.
"""

import math

import torch
from peft import PeftModel
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl.families.sizes import Sizes
from qerl.fp4.linear import LINEAR_CLASSES
from qerl.lora.adapter import add_lora


def random_policy(sizes: Sizes, weights: str, rank: int, positions: int) -> PeftModel:
    """A Qwen2 model of a shape with random frozen linears in a format and fresh LoRA, made on the GPU.

    Args:
        sizes: The shape.
        weights: One of `benchmarks.decoder.WEIGHTS`.
        rank: LoRA rank on all linears.
        positions: Positions the model has.
    """
    config = Qwen2Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, max_position_embeddings=positions, tie_word_embeddings=False,
        rms_norm_eps=1e-6,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device="cuda")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name.endswith("_proj") and weights != "bf16":
                setattr(module, name, _random_linear(child, weights))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                made = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
                if made.ndim == 2:
                    made.normal_(std=made.shape[-1] ** -0.5)
                else:
                    made.fill_(0.0 if name == "bias" else 1.0)
                setattr(module, name, nn.Parameter(made, requires_grad=False))
    # transformers' mark of such a model, by which PEFT takes its layer for NF4 and TRL a bf16 adapter.
    model.is_loaded_in_4bit = weights == "nf4"
    return add_lora(model, rank=rank, alpha=2 * rank, dropout=0.0)


def _random_linear(linear: nn.Linear, weights: str) -> nn.Module:
    """A layer of random content in the format, biases zero; weights have mean square 1 / K or so."""
    k, n, bias = linear.in_features, linear.out_features, linear.bias is not None
    if weights == "nf4":
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(
            k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
        )
        dense = torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_(std=k**-0.5)
        layer.weight = bnb.nn.Params4bit(dense, requires_grad=False, quant_type="nf4").to("cuda")
    else:
        packed = LINEAR_CLASSES[weights](k, n, bias=False, device="cuda")
        packed.weight_packed.random_(0, 256)
        # Codes have a mean square of 7.2, E4M3 scales of 1 to 1.875 one of 2.2; together 16.
        scales = packed.weight_scale.view(torch.uint8)
        if packed.weight_global_scale is not None:
            scales.random_(56, 64)
            packed.weight_global_scale.fill_((16 * k) ** 0.5)
        else:
            scales.fill_(127 - round(math.log2((7.2 * k) ** 0.5)))
        layer = packed
    if bias:
        layer.bias = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda"), requires_grad=False)
    return layer
