"""Fixtures: tiny random models of each family and a tiny chat tokenizer, made in memory."""

import gc
import os
import string
from collections.abc import Callable, Iterator

import torch

# Where there is no GPU, kernels written in Triton run in its interpreter. Triton reads this once, on import.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
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


@pytest.fixture(scope="session", autouse=True)
def imports_are_not_garbage() -> Iterator[None]:
    """Every run of a trainer collects garbage; walking what was imported takes longer than tiny steps do."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_tiny_model(family: str = "llama", seed: int = 0, **overrides) -> PreTrainedModel:
    """fp32, 2 layers, hidden 64, vocabulary 128, in eval mode.

    Norm weights and biases are random too, so that no test passes because they are all one or zero.
    """
    config_class, model_class = FAMILIES[family]
    settings = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
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


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model(family, seed=0, **config)``, see `make_tiny_model`."""
    return make_tiny_model


@pytest.fixture(scope="session")
def to_nf4() -> Callable[[PreTrainedModel], PreTrainedModel]:
    """``to_nf4(model)``: the same model, its projections replaced by bitsandbytes' NF4 layers."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def convert(model: PreTrainedModel) -> PreTrainedModel:
        for module in list(model.modules()):
            for name, linear in list(module.named_children()):
                if not name.endswith("_proj"):
                    continue
                weight = linear.weight.data
                layer = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype,
                    quant_type="nf4", device="meta",
                )  # fmt: skip
                layer.weight = bnb.nn.Params4bit(weight, quant_type="nf4").to(weight.device)
                layer.bias = linear.bias
                # Otherwise some CPUs write a layer's codes in an order of their own when it first runs.
                layer.support_avx512bf16_for_cpu = False
                setattr(module, name, layer)
        model.is_loaded_in_4bit = True  # as transformers marks a model that it quantised; PEFT looks at it
        return model

    return convert


@pytest.fixture
def step_sizes(monkeypatch) -> list[int]:
    """Rows of the step that the paged engine takes, one number for each round."""
    from qerl.rollout.paged.call import Call

    sizes: list[int] = []
    fit = Call._fit_step

    def spy(call, admitted):
        fit(call, admitted)
        sizes.append(call._step.rows)

    monkeypatch.setattr(Call, "_fit_step", spy)
    return sizes


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """See `make_tiny_tokenizer`."""
    return make_tiny_tokenizer()


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
