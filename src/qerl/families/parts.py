"""The parts of a loaded model that noise, rollout and update read, with or without PEFT around it."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

WITH_STATE = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "linear_attention")
"""By ``model_type`` the type of layers that carry a state and whose state is handled at sample borders: gated
delta nets, by `qerl.update.delta_net` in the update and by either engine in rollouts."""


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a ``PeftModel``, or the model itself.

    LoRA replaces linears in place, so every other module keeps its qualified name inside the base model.
    Names taken from here are therefore the same with and without an adapter.
    """
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def cache_argument(model: nn.Module) -> str:
    """Return the name under which a model's forward takes a cache of keys and values.

    transformers 5.24 calls it `cache`, earlier versions and models with code of their own `past_key_values`.
    """
    named = inspect.signature(type(base_model(model)).forward).parameters
    return "cache" if "cache" in named else "past_key_values"


def layers_with_state(config: PreTrainedConfig) -> list[bool]:
    """Return for each decoder layer True if it carries a state from token to token instead of a KV cache.

    Args:
        config: Config of a model that can be trained (`qerl.families.supported.why_not`), or of its decoder.
    """
    text = config.get_text_config(decoder=True)
    kind = WITH_STATE.get(text.model_type)
    if kind is None:
        return [False] * text.num_hidden_layers
    return [each == kind for each in text.layer_types]


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put every module into eval mode inside the block, and restore each module's own mode afterwards."""
    return _mode(model, False)


def train_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put every module into training mode inside the block, and restore each module's own mode afterwards."""
    return _mode(model, True)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Restore modes one by one, since ``model.train()`` would also change modules that were in eval mode."""
    others = [module for module in model.modules() if module.training != training]
    model.train(training)
    try:
        yield
    finally:
        for module in others:
            module.training = not training
