"""Sampling completions from the policy that trains.

``engine`` is the contract, ``portable`` the implementation for any transformers causal LM on any device. It
is put together from parts that know nothing of each other: ``scheduler`` (which sequences run, torch-free),
``sampling`` (logits to token), ``cache`` (keys and values), ``attention`` and ``runner`` (the model call).
"""

from qerl.rollout.engine import Completion, NormOffsets, RolloutEngine, RolloutResult, SamplingParams
from qerl.rollout.portable.engine import PortableEngine

__all__ = ["Completion", "NormOffsets", "PortableEngine", "RolloutEngine", "RolloutResult", "SamplingParams"]
