"""A tiny model with a tokenizer, and an adapter of it as a run leaves one."""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qerl.lora.adapter import add_lora
from qerl.models.load import load_model
from tests.support.models import move_adapter

TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"


def save_model(folder: Path) -> None:
    vocabulary = ["<pad>", "<eos>", "<unk>", "\n", *string.printable[:95]]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def save_adapter(base: Path, folder: Path) -> None:
    adapted = add_lora(
        load_model(str(base), "nvfp4", torch.float32, torch.device("cpu")), rank=4, alpha=4, dropout=0.0
    )
    move_adapter(adapted, 1.0)
    adapted.save_pretrained(folder)
    (folder / "config.yaml").write_text(f"model: {base}\nweights: nvfp4\nrounding: mse\n")
