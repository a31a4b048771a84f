"""Gradient checkpointing of every n-th layer, whoever turns it on.

transformers counts layers from 0, so whatever n is, it recomputes the first. Here an n above the number of
layers recomputes none, which takes no more memory: one layer's activations are there in any case.

transformers takes `every_n_layers` and `offload` out of `gradient_checkpointing_kwargs` when training begins.
TRL 1.16 turns checkpointing off and on again around each rollout and hands the same mapping on whole, which
torch refuses. Here the model itself accepts it.
"""

import functools
from typing import Any, cast

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl.families.parts import base_model

_OF_TRANSFORMERS = ("every_n_layers", "offload")


def accept_every_n_layers(model: nn.Module) -> None:
    """Make `gradient_checkpointing_enable` take `every_n_layers` as this module says, among torch's own
    settings as well.

    The function is that of the transformers model, which PEFT hands on and through which
    `activation_checkpointing_enable` goes, so it makes no difference who calls which.

    Args:
        model: A transformers model, or a ``PeftModel`` around one.
    """
    inner = cast(Any, base_model(model))
    enable = inner.gradient_checkpointing_enable

    @functools.wraps(enable)
    def wrapped(gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        of_torch = dict(gradient_checkpointing_kwargs or {})
        kwargs |= {name: of_torch.pop(name) for name in _OF_TRANSFORMERS if name in of_torch}
        enable(gradient_checkpointing_kwargs=of_torch or None, **kwargs)
        layers = [layer for layer in inner.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if kwargs.get("every_n_layers", 1) > len(layers):
            for layer in layers:
                layer.gradient_checkpointing = False

    inner.gradient_checkpointing_enable = wrapped
