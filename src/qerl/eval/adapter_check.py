"""Proof that an adapter is in use.

An evaluation that loads an adapter and then scores the base model looks like any other: the released QeRL
code did that. So logits are computed with and without the adapter, and no difference is an error.
"""

import math

import torch
from peft import PeftModel

from qerl.errors import QeRLError
from qerl.families.parts import eval_mode


def prove_adapter(model: PeftModel, prompt_ids: list[int]) -> float:
    """Largest absolute difference of the logits with the adapter on and off.

    Args:
        model: Model with an active adapter.
        prompt_ids: Any prompt, at least one token.

    Raises:
        QeRLError: The logits are the same, so an evaluation would score the base model, or they are not
            finite.
    """
    ids_1T = torch.tensor([prompt_ids], device=model.device)
    with torch.no_grad(), eval_mode(model):
        on = model(input_ids=ids_1T, use_cache=False).logits
        with model.disable_adapter():
            off = model(input_ids=ids_1T, use_cache=False).logits
    difference = (on - off).abs().max().item()
    if not math.isfinite(difference):
        raise QeRLError(
            "With the adapter the logits are not finite: it diverged, or belongs to another model; take an "
            "earlier checkpoint."
        )
    if difference == 0:
        raise QeRLError(
            "The adapter changes no logit, so this would score the base model; check that it was trained and "
            "belongs to this model."
        )
    return difference
