"""What noise and rollout need of a model's module tree, with or without a PEFT wrapper around it."""

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
    """Puts every module into eval mode and gives each its own former mode back, also when the body raises.

    ``model.train()`` would not do: it also wakes modules that somebody had set to eval on purpose.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
