"""Tiny random models and a tiny tokenizer, and what is done to them."""

import string
from collections.abc import Callable
from typing import TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qerl.fp4.format import BLOCK_FORMATS
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
PAD, EOS, UNK, IM_START = "<pad>", "<|im_end|>", "<unk>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Model = TypeVar("Model", bound=nn.Module)


TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
"""Settings of a tiny model of any family."""


def make_tiny_model(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """fp32, 2 layers, hidden 64, vocabulary 128, in eval mode.

    Norm weights and biases are random too, so that no test passes because they are all one or zero.
    """
    config_class, model_class = FAMILIES[family]
    settings = TINY | {"max_position_embeddings": 512, "tie_word_embeddings": False}
    config = config_class(**(settings | overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and newline, with a ChatML template; 100 tokens.

    Saved next to a Qwen2 model it comes back as another class (AutoTokenizer goes by the config), so models
    that are loaded together with it should be of another family.
    """
    vocabulary = [PAD, EOS, UNK, IM_START, "\n", *string.printable[:95]]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def move_adapter(model: Model, std: float = 0.1, adapter: str = "default") -> Model:
    """The same model, as if its adapter were trained: LoRA's B random instead of zero.

    Only then has A a gradient, and the adapter an effect. Draws from torch's own generator.
    """
    for name, parameter in model.named_parameters():
        if "lora_B" in name and adapter in name:
            parameter.normal_(std=std)
    return model


def replace_projections(model: Model, layer: Callable[[nn.Linear], nn.Module]) -> Model:
    """The same model with ``layer(linear)`` in place of each linear of its attention and MLP."""
    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if name.endswith("_proj"):
                setattr(module, name, layer(linear))
    return model


def pack(model: Model, weights: str = "nvfp4") -> Model:
    """The same model with its projections rounded to nearest in a four-bit format."""

    def layer(linear: nn.Linear) -> nn.Module:
        packed = quantize(linear.weight.data.float(), BLOCK_FORMATS[weights], "rtn")
        return PackedLinear.of(packed, linear.bias)

    return replace_projections(model, layer)
