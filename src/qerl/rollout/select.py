"""Which engine samples from a model on this machine."""

from torch import nn

from qerl.rollout.engine import RolloutEngine
from qerl.rollout.portable import PortableEngine


def make_engine(model: nn.Module, pad_token_id: int, max_sequences: int) -> RolloutEngine:
    """The engine for a model where it is now.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not.
        pad_token_id: Any id of the vocabulary; it fills masked positions.
        max_sequences: Most sequences decoded at the same time.
    """
    return PortableEngine(model, pad_token_id=pad_token_id, max_sequences=max_sequences)
