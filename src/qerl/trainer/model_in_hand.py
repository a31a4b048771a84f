"""Checks of a loaded model that is passed to the trainer, of its optimizer, and the settings it implies."""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.linear import PackedLinear
from qerl.settings.adapter import LORA_FIELDS, plain


def held(model: nn.Module) -> dict[str, Any]:
    """Return the values that a loaded model implies for the settings that describe a model."""
    found: dict[str, Any] = {
        "tuning": "full",
        "weights": weights_of(model),
        "dtype": str(base_model(model).dtype).removeprefix("torch."),
    }
    if not isinstance(model, PeftModel):
        return found
    adapter = model.active_peft_config
    values = {name: plain(getattr(adapter, attribute, None)) for name, attribute in LORA_FIELDS.items()}
    if isinstance(values["lora_target_modules"], str):  # a pattern: list the names that it matched
        values["lora_target_modules"] = sorted(
            {
                name.rpartition(".")[2]
                for name, module in base_model(model).named_modules()
                if isinstance(module, BaseTunerLayer)
            }
        )
    # Adapters of another kind have no rank or alpha.
    return found | {name: value for name, value in values.items() if value is not None} | {"tuning": "lora"}


def weights_of(model: nn.Module) -> str:
    packed = next((module for module in model.modules() if isinstance(module, PackedLinear)), None)
    if packed is not None:
        return packed.format.name
    return "nf4" if getattr(base_model(model), "is_loaded_in_4bit", False) else "bf16"


def check_whole(model: nn.Module) -> None:
    """Raise if a model cannot compute log-probabilities: it has no output head, or is on the meta device."""
    base = base_model(model)
    if base.get_output_embeddings() is None:
        raise QeRLError(
            f"The {type(base).__name__} that was handed in has no output head, so it predicts no tokens; "
            "load it with AutoModelForCausalLM."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise QeRLError(
            "The model that was handed in is on the meta device, where weights have no values; load it with "
            "from_pretrained."
        )


def check_dtype(model: nn.Module) -> None:
    """Raise unless the model's dtype is FP32 or BF16, the only ones supported in training and evaluation."""
    dtype = base_model(model).dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise QeRLError(
            f"The model that was handed in is {str(dtype).removeprefix('torch.')}, in which small gradients "
            "vanish; load it with dtype=torch.bfloat16 or torch.float32."
        )


def check_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Raise if the optimizer holds parameters that are not trained parameters of the policy."""
    if optimizer is None:
        return
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise QeRLError(
            "The optimizer has parameters that the policy does not train; create it from the parameters of "
            "the model that you pass in, after adding its adapter."
        )
