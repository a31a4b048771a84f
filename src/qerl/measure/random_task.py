"""Prompts, rewards and a tokenizer without meaning, so that the time of a step depends on its sizes alone."""

from collections.abc import Callable
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


def random_rewards(dead: float = 0.0) -> Callable[..., list[float]]:
    """Return a reward function: random, different for all samples of a group, but 0 for dead prompts.

    A prompt is dead whenever it is sampled. So that runs compare, there is no chance in how many prompts are:
    of the first n in the order in which they are first scored, ``dead`` times n are, rounded down.

    Args:
        dead: Share of the prompts that are dead.
    """
    order: dict[str, int] = {}

    def random_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards = torch.rand(len(completions)).tolist()
        at = [order.setdefault(prompt, len(order)) for prompt in prompts]
        alive = [int(dead * (i + 1)) == int(dead * i) for i in at]
        return [reward * lives for reward, lives in zip(rewards, alive, strict=True)]

    return random_reward
