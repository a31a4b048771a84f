"""Sampling of completions from the policy that is trained.

``engine`` has the interface and draws tokens from logits, ``session`` tracks sequences sampled in turns,
``stops`` ends turns, ``select`` chooses an engine. ``portable`` runs any causal LM of transformers on any
device; ``paged`` is the engine for Hopper GPUs.
"""
