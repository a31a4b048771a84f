"""Fused products of a layer and its adapter in the update, as far as settings tell. Free of torch.

`qerl.lora.product` looks at the layers themselves, the memory plan (`qerl.plan`) has the settings alone.
"""

from qerl.weight_formats import FORMATS, WeightFormatName

OTHER_LAYER = "PEFT's own layers multiply these weights"


def dropout_reason(probability: float) -> str:
    """The reason why layers with dropout in front of their adapters are left to PEFT."""
    return f"lora_dropout is {probability:g}"


def why_not_fused(weights: WeightFormatName, lora_dropout: float) -> str | None:
    """The reason why the update leaves adapted layers to PEFT; None where layer and adapter are one
    product."""
    if not FORMATS[weights].fused_update:
        return OTHER_LAYER
    return dropout_reason(lora_dropout) if lora_dropout > 0 else None
