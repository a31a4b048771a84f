"""The parts of a loaded model that noise, rollout and update read, with or without PEFT around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a ``PeftModel``, or the model itself.

    LoRA replaces linears in place, so every other module keeps its qualified name inside the base model.
    Names taken from here are therefore the same with and without an adapter.
    """
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode for the body, and give each its former mode back, also after an error.

    ``model.train()`` would not do: it also wakes modules that somebody had set to eval on purpose.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def train_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into training mode for the body, and give each its former mode back afterwards."""
    evaluating = [module for module in model.modules() if not module.training]
    model.train()
    try:
        yield
    finally:
        for module in evaluating:
            module.training = False
