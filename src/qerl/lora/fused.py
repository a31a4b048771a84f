"""Prediction from settings alone of whether the update fuses layers with their adapters; without torch.

`qerl.lora.product` inspects the layers themselves; the memory plan (`qerl.plan`) has only the settings.
"""

from qerl.weight_formats import FORMATS, WeightFormatName

OTHER_LAYER = "PEFT's own layers multiply these weights"


def dropout_reason(probability: float) -> str:
    """Return the reason why PEFT computes layers with dropout before their adapters."""
    return f"lora_dropout is {probability:g}"


def why_not_fused(weights: WeightFormatName, lora_dropout: float) -> str | None:
    """Return why the update leaves adapted layers to PEFT; None if layer and adapter are one product."""
    if not FORMATS[weights].fused_update:
        return OTHER_LAYER
    return dropout_reason(lora_dropout) if lora_dropout > 0 else None
