"""Prompts, rewards and a tokenizer without meaning, so that the time of a step depends on its sizes alone."""

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_WORDS = 1000


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer in which words w0, w1, ... are tokens 0, 1, ... and the end of text lies outside the
    model's vocabulary."""
    words = {f"w{i}": i for i in range(_WORDS)} | {"<end>": vocabulary}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="w0")


def random_prompts(count: int, tokens: int) -> list[str]:
    """Different prompts of ``tokens`` tokens each, the same in every run."""
    draw = torch.Generator().manual_seed(0)
    return [
        " ".join(f"w{i}" for i in torch.randint(1, _WORDS, (tokens,), generator=draw).tolist())
        for _ in range(count)
    ]


def random_reward(prompts: list[str], completions: list[str], dead: float = 0.0, **_: Any) -> list[float]:
    """Random rewards, different for all samples of a group, but 0 for all samples of a dead prompt; a prompt
    is dead with probability ``dead``, and then every time it is sampled."""
    alive = {prompt: random.Random(prompt).random() >= dead for prompt in set(prompts)}
    rewards = torch.rand(len(completions)).tolist()
    return [reward * alive[prompt] for prompt, reward in zip(prompts, rewards, strict=True)]
