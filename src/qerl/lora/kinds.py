"""Check that an adapted layer computes plain LoRA, before a kernel other than PEFT's computes it.

PEFT's layers can compute more than ``W x + s B A x``: other kinds of adapters, variants of LoRA, biases,
several adapters at once. The paged engine and the update have kernels only for that formula, so they check
here first. If the layer computes anything else, it is left to PEFT, or the engine is refused with the reason;
a different formula is never computed silently.
"""

from typing import cast

from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer


def why_not(layer: BaseTunerLayer) -> str | None:
    """Return why a layer computes neither ``W x`` nor ``W x + s B A x`` of one adapter; None if it does.

    The reason completes a sentence that begins with the layer's name.
    """
    if layer.merged:
        # PEFT unmerges the adapter in its next forward pass; another kernel would not.
        return "has an adapter that is merged and disabled at once" if layer.disable_adapters else None
    if layer.disable_adapters:
        return None
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if not (isinstance(layer, LoraLinear) or kind == "peft.tuners.lora.bnb.Linear4bit"):
        return f"carries an adapter of the kind {kind.removeprefix('peft.tuners.')}"
    names = _active(layer)
    if len(names) > 1:
        return f"has several active adapters ({', '.join(names)})"
    for name in names:
        if name in layer.lora_variant:
            return f"uses a variant of LoRA ({type(layer.lora_variant[name]).__name__})"
        if layer.lora_bias[name]:
            return "has a bias inside its adapter (lora_bias)"
    return None


def active_adapter(layer: BaseTunerLayer) -> str | None:
    """Return the adapter that a layer adds for which :func:`why_not` is None; None if it adds none."""
    if layer.merged or layer.disable_adapters:
        return None
    return next(iter(_active(layer)), None)


def _active(layer: BaseTunerLayer) -> list[str]:
    return [name for name in layer.active_adapters if name in cast(LoraLinear, layer).lora_A]
