"""Settings of gradient checkpointing in the arguments of TRL and transformers."""

import logging
from typing import Any, cast

import torch
from torch import nn
from transformers import TrainingArguments

logger = logging.getLogger(__name__)


def set_checkpointing(args: TrainingArguments, **options: int | bool) -> None:
    """Set options of gradient checkpointing, under both names that transformers has for the mapping.

    From 5.18 on a trainer reads `activation_checkpointing_kwargs`, and TRL reads the older name.
    """
    settings: Any = args
    kwargs = (settings.gradient_checkpointing_kwargs or {}) | options
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if hasattr(settings, name):
            setattr(settings, name, kwargs)


def no_offload_on_cpu(args: TrainingArguments, device: torch.device) -> None:
    """Turn `offload` off and say so in a run on the CPU, whose activations are in its memory already.

    transformers would ask there for memory pinned for a GPU, which torch refuses.
    """
    if device.type == "cpu" and (args.gradient_checkpointing_kwargs or {}).get("offload"):
        logger.warning(
            "gradient_checkpointing_kwargs: {offload: true} is turned off: this run is on the CPU, in whose "
            "memory inputs of layers are in any case."
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
