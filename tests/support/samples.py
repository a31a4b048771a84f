"""Samples of an update, made of their tokens alone."""

import math
from collections.abc import Sequence

from qerl.update.packed_row import Sample


def samples_of(prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> list[Sample]:
    """One sample of each prompt, of which nothing but its tokens is known; those with one prompt are a
    group."""
    groups = {tuple(prompt): number for number, prompt in reversed([*enumerate(prompts)])}
    return [
        Sample(prompt, tokens, *[[math.nan] * len(tokens)] * 2, group=groups[tuple(prompt)])
        for prompt, tokens in zip(prompts, completions, strict=True)
    ]
