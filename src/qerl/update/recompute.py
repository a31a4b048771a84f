"""Gradient checkpointing of every n-th layer, and its settings in transformers' arguments.

transformers counts layers from 0, so it recomputes the first for any n. Here an n above the number of layers
recomputes none, which takes no more memory: one layer's activations are live in any case. transformers
removes `every_n_layers` and `offload` from `gradient_checkpointing_kwargs` when training begins; other
callers pass the mapping on whole, which torch refuses, so here the model itself accepts it.
"""

import functools
import logging
from typing import Any, cast

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from qerl.families.parts import base_model

logger = logging.getLogger(__name__)

_OF_TRANSFORMERS = ("every_n_layers", "offload")


def accept_every_n_layers(model: nn.Module) -> None:
    """Make `gradient_checkpointing_enable` accept `every_n_layers` with the meaning above, also among torch's
    own settings.

    It replaces the method of the transformers model, which PEFT and `activation_checkpointing_enable` call,
    so it takes effect for every caller.

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


def set_checkpointing(args: TrainingArguments, **options: int | bool) -> None:
    """Set options of gradient checkpointing, under both names that transformers has for the mapping.

    From 5.18 on a trainer reads `activation_checkpointing_kwargs`; other code still reads the older name.
    """
    settings: Any = args
    kwargs = (settings.gradient_checkpointing_kwargs or {}) | options
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if hasattr(settings, name):
            setattr(settings, name, kwargs)


def no_offload_on_cpu(args: TrainingArguments, device: torch.device) -> None:
    """Turn `offload` off with a warning in a run on the CPU, where activations are in CPU memory already.

    transformers would request memory pinned for a GPU, which torch refuses there.
    """
    if device.type == "cpu" and (args.gradient_checkpointing_kwargs or {}).get("offload"):
        logger.warning(
            "gradient_checkpointing_kwargs: {offload: true} is turned off: this run is on the CPU, so layer "
            "inputs are in CPU memory anyway."
        )
        set_checkpointing(args, offload=False)


def recompute_every_layer(model: nn.Module, args: TrainingArguments) -> bool:
    """Recompute the activations of every layer from here on.

    Returns:
        Whether some layers kept theirs before.
    """
    kwargs = cast(dict[str, Any], args.gradient_checkpointing_kwargs or {})
    if not args.gradient_checkpointing or kwargs.get("every_n_layers", 1) == 1:
        return False
    set_checkpointing(args, every_n_layers=1)
    cast(Any, model).gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    return True
