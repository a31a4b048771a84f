"""Prompts and sampling of the portable engine's tests."""

from qerl.rollout.engine import SamplingParams

PAD = 0
PROMPTS = [[5, 17, 33, 2, 90, 41, 8], [77], [12, 12, 60, 101], [9, 8, 7, 6, 5, 4, 3, 2, 99, 98, 97], [64, 3]]


def sampled(**settings):
    return SamplingParams(**({"max_tokens": 12, "seed": 3} | settings))
