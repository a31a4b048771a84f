"""The reference policy of the KL penalty (beta > 0): the policy as it was given to the trainer.

Which weights that takes depends on what trains:

- Fresh LoRA: none. B = 0 at the start, so the reference is the model with its adapter disabled, and neither
  the GPU nor the run folder holds a second adapter.
- An adapter that has been trained before: a frozen copy of it, the adapter `ref`. A checkpoint holds it too,
  in the folder `ref`, and it is the checkpoint that decides which reference a resumed run has.
- Full tuning: a frozen copy of the model. It is copied in memory and not read again from where the model
  came from, so a GGUF file or a model that was changed before training is its own reference. A checkpoint
  holds it only where it moves (`sync_ref_model`): as many bytes as the model.

TRL would make a `ref` adapter for a fresh adapter too, because it cannot know that it is fresh, and resuming
from a checkpoint with two adapters restores only the reference. So TRL is made without a reference, and this
module gives it one. TRL then finds the adapter by its name, or the model as `ref_model`.
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
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from qerl.errors import QeRLError

ADAPTER = "ref"
"""The name by which TRL finds a reference adapter."""

_FILE = "reference.safetensors"


@contextmanager
def none_by_trl(args: Any) -> Iterator[None]:
    """While TRL's constructor runs in this block, it makes no reference of its own."""
    beta, sync = args.beta, args.sync_ref_model
    args.beta, args.sync_ref_model = 0.0, False
    try:
        yield
    finally:
        args.beta, args.sync_ref_model = beta, sync


def add_reference(trainer: GRPOTrainer) -> None:
    """Give a trainer whose policy is complete the reference that its settings ask for.

    Raises:
        QeRLError: The settings or the adapter allow no reference.
    """
    args, policy = trainer.args, trainer.model
    trainer.beta = args.beta
    if args.beta == 0.0:
        return
    if isinstance(policy, PeftModel):
        if args.sync_ref_model:
            raise QeRLError(
                "sync_ref_model needs full tuning, as with LoRA the reference is the base model; remove it."
            )
        _add_adapter(policy)
        return
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise QeRLError(
            "beta > 0 with full tuning does not run under DeepSpeed or FSDP; set beta: 0 or use LoRA."
        )
    trainer.ref_model = _copy(cast(PreTrainedModel, policy))
    if args.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(trainer.ref_model, trainer.accelerator))


def _add_adapter(model: PeftModel) -> None:
    """Keep a copy of an adapter that is not fresh; of one that is, the model without it serves."""
    config = model.peft_config[model.active_adapter]
    if getattr(config, "bias", "none") != "none":
        raise QeRLError(
            f"beta > 0 needs an adapter without trained biases (bias is {config.bias!r}): the reference has "
            "those of the base model, which training changes. Set bias to 'none', or beta: 0."
        )
    if ADAPTER in model.peft_config or _is_fresh(model, config):
        return
    model.add_adapter(ADAPTER, config)
    own, copied = f".{model.active_adapter}.", f".{ADAPTER}."
    for name, parameter in list(model.named_parameters()):
        if own in name:
            model.get_parameter(name.replace(own, copied)).data.copy_(parameter.data)


def _is_fresh(model: PeftModel, config: Any) -> bool:
    """Whether a model computes the same with and without its adapter: plain LoRA with B = 0."""
    plain = isinstance(config, LoraConfig) and not (
        config.use_dora or config.modules_to_save or config.trainable_token_indices
    )
    return plain and not any(
        parameter.any()
        for name, parameter in model.named_parameters()
        if f".{model.active_adapter}" in name and ("lora_B" in name or "lora_embedding_B" in name)
    )


def _copy(policy: PreTrainedModel) -> PreTrainedModel:
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    # These two belong to the policy, whose weights their closures hold.
    for module in (reference, cast(nn.Module, reference.get_output_embeddings())):
        module.__dict__.pop("forward", None)
    return reference


def save_reference(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Put a reference that moves into a checkpoint folder."""
    if trainer.args.sync_ref_model and trainer.args.should_save:
        checkpoint.mkdir(parents=True, exist_ok=True)
        save_model(trainer.ref_model, str(checkpoint / _FILE))


def load_reference(trainer: GRPOTrainer, checkpoint: Path) -> bool:
    """Read what transformers cannot read from a checkpoint: the reference, and an adapter that has one.

    Returns:
        Whether the policy was read too; if not, its weights are the model's and transformers' to read.

    Raises:
        QeRLError: The reference moves and the checkpoint has none.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(policy, PeftModel):
        return _load_adapters(policy, checkpoint, trainer.beta != 0.0)
    if trainer.args.sync_ref_model:
        if not (checkpoint / _FILE).is_file():
            raise QeRLError(
                f"{checkpoint} has no {_FILE}: it was saved without sync_ref_model; resume it without, too."
            )
        load_model(trainer.ref_model, checkpoint / _FILE)
    return False


def _load_adapters(model: PeftModel, checkpoint: Path, reference: bool) -> bool:
    if not (checkpoint / SAFETENSORS_WEIGHTS_NAME).is_file():
        return False
    active = model.active_adapter
    if ADAPTER in model.peft_config:
        model.delete_adapter(ADAPTER)
    model.load_adapter(str(checkpoint), active, is_trainable=True)
    if reference and (checkpoint / ADAPTER / SAFETENSORS_WEIGHTS_NAME).is_file():
        model.add_adapter(ADAPTER, model.peft_config[active])
        model.load_adapter(str(checkpoint / ADAPTER), ADAPTER)
    return True
