"""Sequences for tests of what holds them."""

from qerl.rollout.engine import SamplingParams
from qerl.rollout.session import new_sequences


def queued(scheduler, prompts, limits):
    """New sequences in a scheduler's queue, of as many samples for each prompt, with so many tokens each."""
    sequences = new_sequences(prompts, [SamplingParams(limit) for limit in limits])
    scheduler.add(sequences)
    return sequences
