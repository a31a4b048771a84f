"""The reference policy of the KL penalty (beta > 0): the policy as it was given to the trainer.

Which weights that takes depends on what trains:

- Fresh LoRA: none. B = 0 at the start, so the reference is the model with its adapter disabled, and neither
  the GPU nor the run folder holds a second adapter.
- An adapter that has been trained before: a frozen copy of it, the adapter `ref`, as in TRL. A checkpoint
  holds it too, in the folder `ref`, and it is the checkpoint that decides which reference a resumed run has.
- Full tuning: a frozen copy of the model. It is copied in memory and not read again from where the model
  came from, so a GGUF file or a model that was changed before training is its own reference. A checkpoint
  holds it only where it moves (`sync_ref_model`): as many bytes as the model.
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
    """Another policy than the one that trains, for passes without a gradient.

    Attributes:
        model: A model of its own; None for the base of the policy that trains.
        adapter: Name of the frozen adapter on that base, which it is without where there is none of this
            name.
    """

    def __init__(self, model: PreTrainedModel | None = None, adapter: str | None = None) -> None:
        self.model, self.adapter = model, adapter

    @contextmanager
    def active(
        self, policy: nn.Module, wrapped: nn.Module
    ) -> Iterator[tuple[nn.Module, PreTrainedModel | None]]:
        """A block in which a model computes this policy: that model, and the transformers model in it where
        it is another than that of the policy that trains.

        Args:
            policy: The one that trains, PEFT-wrapped or not.
            wrapped: The same as it trains, for several processes.
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
    """The reference of a run with beta > 0.

    Args:
        args: Settings of the run.
        policy: As it begins, where it trains; PEFT-wrapped or not.

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
        """What moves the reference, if it moves."""
        return SyncRefModelCallback(self.model, None) if self._args.sync_ref_model else None

    def save(self, checkpoint: Path) -> None:
        """Put a reference that moves into a checkpoint folder."""
        if self._args.sync_ref_model and self._args.should_save:
            checkpoint.mkdir(parents=True, exist_ok=True)
            save_model(cast(nn.Module, self.model), str(checkpoint / _FILE))

    def load(self, checkpoint: Path) -> None:
        """Read a reference that moves.

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
    """Read the adapter of a checkpoint, and the reference's; transformers reads the latter alone.

    Args:
        model: The policy.
        checkpoint: The folder.
        reference: Whether the run has a reference.

    Returns:
        Whether there was an adapter.
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
    """Let experts share the reference's adapter where they share the one that trains."""
    if is_shared(model, active):
        share(model, ADAPTER)


def _add_adapter(model: PeftModel) -> None:
    """Keep a copy of an adapter that is not fresh; of one that is, the model without it serves."""
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
    """Refuse an adapter that trains biases of the base model, which a frozen policy on that base needs as
    they were.

    Raises:
        QeRLError: It does.
    """
    bias = getattr(model.peft_config[model.active_adapter], "bias", "none")
    if bias != "none":
        raise QeRLError(
            f"{field} needs an adapter without trained biases (bias is {bias!r}): {others_have} those of the "
            f"base model, which training changes. Set bias to 'none', or remove {field.split()[0]}."
        )


def is_fresh(model: PeftModel) -> bool:
    """Whether a model computes the same with and without its adapter: plain LoRA with B = 0."""
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
    """A copy of a model that does not train."""
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    # These two belong to the policy, whose weights their closures hold.
    for module in (reference, cast(nn.Module, reference.get_output_embeddings())):
        module.__dict__.pop("forward", None)
    return reference
