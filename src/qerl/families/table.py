"""Model families whose decoder layers are known to the project's own kernels and to the memory plan.

All of them have RMSNorms, attention with several query heads per key head, and gated MLPs or mixtures of
them. A family's file beside this one holds its differences from Llama: it makes descriptions of layers
(`qerl.families.layer`) from a config, and computes nothing. A new family of known kinds takes such a file and
a line here. A new kind of mixer or MLP takes a class, and a kernel or function per reader; ARCHITECTURE.md
says where each belongs.

A model that samples and trains without these kernels needs no entry: the portable engine and the update check
a model by what it computes (`qerl.families.supported`, `qerl.update.row_check`), and noise finds norms by
data flow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qerl.families import gemma, gpt_oss, granite, llama, ministral, olmo, phi, qwen, smollm
from qerl.families.sizes import Sizes


@dataclass(frozen=True)
class Family:
    """The decoders of one ``model_type``.

    Attributes:
        name: Its usual spelling.
        sizes: Makes the description of a model's layers from its config, a ``transformers.PreTrainedConfig``.
        checkpoints: Classes in which its checkpoints are published and read, as text for docs.
    """

    name: str
    sizes: Callable[[Any], Sizes]
    checkpoints: str = "causal LM"


FAMILIES = {
    "llama": Family("Llama", llama.sizes),
    "mistral": Family("Mistral", llama.sizes),
    "qwen2": Family("Qwen2", llama.sizes, "causal LM; Qwen2.5-VL"),
    "qwen3": Family("Qwen3", llama.sizes, "causal LM; Qwen3-VL"),
    "qwen3_moe": Family("Qwen3-MoE", llama.sizes, "causal LM with an expert per name"),
    "qwen3_5_text": Family(
        "Qwen3.5, 3.6, 3.8", qwen.sizes, "`Qwen3_5ForConditionalGeneration`, also in ModelOpt's mixed NVFP4"
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3.5 and 3.6 with experts",
        qwen.sizes,
        "`Qwen3_5MoeForConditionalGeneration`, experts merged or one by one",
    ),
    "gemma3_text": Family("Gemma 3", gemma.sizes3, "causal LM (270M, 1B); `Gemma3ForConditionalGeneration`"),
    "gemma4_text": Family(
        "Gemma 4", gemma.sizes4, "`Gemma4ForConditionalGeneration`, also in ModelOpt's NVFP4"
    ),
    "gpt_oss": Family("gpt-oss", gpt_oss.sizes, "causal LM with merged experts, in MXFP4 or 16 bits"),
    "granite": Family("Granite", granite.sizes),
    "granite_swa": Family("Granite SWA", granite.sizes),
    "ministral3": Family("Ministral 3", ministral.sizes, "`Mistral3ForConditionalGeneration`, also in FP8"),
    "olmo3": Family("OLMo 3", olmo.sizes),
    "phi3": Family("Phi-3 and 4", phi.sizes),
    "smollm3": Family("SmolLM3", smollm.sizes),
}
"""By ``model_type`` of config.json, which in a model for images or sound is that of its ``text_config``."""

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_TYPES = {"full_attention", "sliding_attention", "linear_attention"}
_UNKNOWN = {
    "attn_logit_softcapping": "its scores have a soft cap",
    "hidden_size_per_layer_input": "it adds an embedding to each layer",
    "num_kv_shared_layers": "some of its layers take the keys of others",
    "enable_moe_block": "it is a mixture of experts",
}
"""Config fields that, if set, make layers differ from the description in their family's file."""


def why_not_described(config: Any) -> str | None:
    """Return why no description here fits a model with this config; None if one does.

    Args:
        config: Config of a causal LM, a ``transformers.PreTrainedConfig``.
    """
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of {', '.join(FAMILIES)}"
    if reason := next((why for field, why in _UNKNOWN.items() if getattr(config, field, None)), None):
        return reason
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention is bidirectional"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - _TYPES):
        return f"it has layers of the type {others[0]}"
    found = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    described = {
        _ACTIVATIONS[run.spec.mlp.activation] for run in FAMILIES[config.model_type].sizes(config).runs
    }
    return None if described == {found} else f"its activation is {found}"
