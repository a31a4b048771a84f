"""The reference policy of the KL penalty (beta > 0): the policy as it was given to the trainer.

The weights that this takes depend on what trains:

- Fresh LoRA: none. B = 0 at the start, so the reference is the model with its adapter disabled, and neither
  the GPU nor the run folder holds a second adapter.
- An adapter that has been trained before: a frozen copy of it, the adapter `ref`, as in TRL. A checkpoint
  holds it too, in the folder `ref`; a resumed run takes its reference from the checkpoint.
- Full tuning: a frozen copy of the model. It is copied in memory and not read again from the model's source,
  so a GGUF file or a model that was changed before training is its own reference. A checkpoint holds it only
  where it moves (`sync_ref_model`): as many bytes as the model.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from trl import SyncRefModelCallback

from qerl.errors import QeRLError
from qerl.lora.experts import is_shared, share
from qerl.settings.config import QeRLConfig

ADAPTER = "ref"
"""Name of the reference adapter, and of its folder in a checkpoint."""

_FILE = "reference.safetensors"


class Frozen:
    """A policy other than the one that trains, for forward passes without a gradient.

    Attributes:
        model: A model of its own; None for the base of the policy that trains.
        adapter: Name of the frozen adapter on that base; without an adapter of this name the base is used
            without any.
    """

    def __init__(self, model: PreTrainedModel | None = None, adapter: str | None = None) -> None:
        self.model, self.adapter = model, adapter

    @contextmanager
    def active(
        self, policy: nn.Module, wrapped: nn.Module
    ) -> Iterator[tuple[nn.Module, PreTrainedModel | None]]:
        """Open a block in which a model computes this policy.

        Args:
            policy: The policy that trains, PEFT-wrapped or not.
            wrapped: The same policy, wrapped for several processes as it trains.

        Yields:
            That model, and the transformers model in it, or None if that is the training policy's.
        """
        if self.model is not None:
            yield self.model, self.model
            return
        model = cast(PeftModel, policy)
        if self.adapter not in model.peft_config:
            with model.disable_adapter():
                yield wrapped, None
            return
        former = model.active_adapter
        model.set_adapter(self.adapter, inference_mode=True)
        try:
            yield wrapped, None
        finally:
            model.set_adapter(former)


class Reference(Frozen):
    """The reference policy of a run with beta > 0.

    Args:
        args: Settings of the run.
        policy: The policy before training, where it trains; PEFT-wrapped or not.

    Raises:
        QeRLError: The settings or the adapter allow no reference.
    """

    def __init__(self, args: QeRLConfig, policy: nn.Module) -> None:
        super().__init__(adapter=ADAPTER)
        self._args = args
        if isinstance(policy, PeftModel):
            if args.sync_ref_model:
                raise QeRLError(
                    "sync_ref_model needs full tuning, as with LoRA the reference is the base model; remove "
                    "it."
                )
            _add_adapter(policy)
        else:
            self.model = frozen_copy(cast(PreTrainedModel, policy))

    def callback(self) -> TrainerCallback | None:
        """Return the callback that moves the reference; None if it does not move."""
        return SyncRefModelCallback(self.model, None) if self._args.sync_ref_model else None

    def save(self, checkpoint: Path) -> None:
        """Write a reference that moves into a checkpoint folder."""
        if self._args.sync_ref_model and self._args.should_save:
            checkpoint.mkdir(parents=True, exist_ok=True)
            save_model(cast(nn.Module, self.model), str(checkpoint / _FILE))

    def load(self, checkpoint: Path) -> None:
        """Read a reference that moves from a checkpoint.

        Raises:
            QeRLError: The checkpoint has none.
        """
        if not self._args.sync_ref_model:
            return
        if not (checkpoint / _FILE).is_file():
            raise QeRLError(
                f"{checkpoint} has no {_FILE}: it was saved without sync_ref_model; resume it without, too."
            )
        load_model(cast(nn.Module, self.model), checkpoint / _FILE)


def load_adapters(model: PeftModel, checkpoint: Path, reference: bool) -> bool:
    """Read a checkpoint's adapter, and the reference's; transformers 5.17 reads the latter alone.

    Args:
        model: The policy.
        checkpoint: The folder.
        reference: Whether the run has a reference.

    Returns:
        Whether the checkpoint has an adapter.
    """
    if not (checkpoint / SAFETENSORS_WEIGHTS_NAME).is_file():
        return False
    active = model.active_adapter
    if ADAPTER in model.peft_config:
        model.delete_adapter(ADAPTER)
    model.load_adapter(str(checkpoint), active, is_trainable=True, torch_device="cpu")
    if reference and (checkpoint / ADAPTER / SAFETENSORS_WEIGHTS_NAME).is_file():
        model.add_adapter(ADAPTER, model.peft_config[active])
        model.load_adapter(str(checkpoint / ADAPTER), ADAPTER, torch_device="cpu")
        _share_as(model, active)
    return True


def _share_as(model: PeftModel, active: str) -> None:
    """Make experts share the reference's adapter where they share the one that trains."""
    if is_shared(model, active):
        share(model, ADAPTER)


def _add_adapter(model: PeftModel) -> None:
    """Add a frozen copy of the policy's adapter as `ref`; if it is fresh, the base without it serves as the
    reference."""
    config = model.peft_config[model.active_adapter]
    check_biases(model, "beta > 0", "the reference has")
    if ADAPTER in model.peft_config or is_fresh(model):
        return
    model.add_adapter(ADAPTER, config)
    own, copied = f".{model.active_adapter}.", f".{ADAPTER}."
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if own in name:
            model.get_parameter(name.replace(own, copied)).data.copy_(parameter.data)
    _share_as(model, model.active_adapter)


def check_biases(model: PeftModel, field: str, others_have: str) -> None:
    """Raise if an adapter trains biases of the base model, which a frozen policy on that base needs
    unchanged.

    Raises:
        QeRLError: The adapter does.
    """
    bias = getattr(model.peft_config[model.active_adapter], "bias", "none")
    if bias != "none":
        raise QeRLError(
            f"{field} needs an adapter without trained biases (bias is {bias!r}): {others_have} those of the "
            f"base model, which training changes. Set bias to 'none', or remove {field.split()[0]}."
        )


def is_fresh(model: PeftModel) -> bool:
    """Return True if a model computes the same with and without its adapter: plain LoRA with B = 0."""
    config: Any = model.peft_config[model.active_adapter]
    plain = isinstance(config, LoraConfig) and not (
        config.use_dora or config.modules_to_save or config.trainable_token_indices
    )
    return plain and not any(
        parameter.any()
        for name, parameter in model.named_parameters()
        if f".{model.active_adapter}" in name and ("lora_B" in name or "lora_embedding_B" in name)
    )


def frozen_copy(policy: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model, frozen and in eval mode."""
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    # A `forward` patched onto the policy is a closure over its weights, so the copy drops it.
    for module in (reference, cast(nn.Module, reference.get_output_embeddings())):
        module.__dict__.pop("forward", None)
    return reference
