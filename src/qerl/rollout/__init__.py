"""Sampling completions from the policy that trains.

``engine`` is the contract, ``select`` chooses an engine, ``sampling`` turns logits into tokens. ``portable``
runs any causal LM of transformers on any device; ``paged`` is the engine for Hopper GPUs.
"""
