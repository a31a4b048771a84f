"""Checks of model support before weights are read, from a config and the names of tensors.

The trainer measures the rest before its first step (`qerl.update.row_check`).
"""

import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.experts import experts_of, why_not_separable
from qerl.families.parts import WITH_STATE

_BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types whose attention is defined by its mask alone."""

LEFT_WHOLE = frozenset({"in_proj_a", "in_proj_b", "gate", "router", "shared_expert_gate"})
"""Last names of matrices that are not quantised, and not adapted unless the settings name them. They are a
thousandth of their layer, and much depends on their outputs: in a gated delta net the decay and the rate,
which are exponentiated or summed over all tokens that follow; in a mixture the choice of experts."""


def why_not(config: PreTrainedConfig, model_class: type) -> str | None:
    """Return why a model of this config and class (transformers' causal LM) cannot be trained here; None if
    it can."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return f"{model_class.__name__} is an encoder-decoder, in which samples cannot share a prompt"
    kind_with_state = WITH_STATE.get(text.model_type)
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _BY_POSITION - {kind_with_state})
    if others or (getattr(model_class, "_is_stateful", False) and not kind_with_state):
        kind = f" ({others[0]})" if others else ""
        return (
            f"{model_class.__name__} has layers{kind} that carry a state from token to token, or choose "
            "what they attend to, so samples cannot share a prompt"
        )
    return None


_EXPERT = re.compile(r"(?:^|\.|(?<!shared)_)experts?(?:[._]|$)")
_SEPARATE = re.compile(r"\.experts\.\d+\.(?:gate|up|down)_proj\.\w+")


def check_experts(family: str, names: Iterable[str], model: PreTrainedModel | None = None) -> None:
    """Raise for a mixture whose experts are not separate linears.

    Args:
        family: Name for the error message.
        names: Names of the checkpoint's tensors.
        model: As it would be loaded, with its experts separated; None if there is none.

    Raises:
        QeRLError: The checkpoint or the model has experts in another form.
    """
    of_experts = [name for name in names if _EXPERT.search(name)]
    other = next((name for name in of_experts if not _SEPARATE.search(name)), None)
    reason = other and f"has {other}"
    if model is not None and any(experts_of(model)) and not of_experts:
        reason = "names none of them"
    if model is not None and (why := why_not_separable(model)):
        reason = f"has {why}"
    if reason:
        raise QeRLError(
            f"{family} is a mixture of experts that {reason}; experts are read one by one, as "
            "experts.0.gate_proj, up_proj and down_proj, or merged as gpt-oss has them. Use another mixture "
            "(docs/families.md) or a dense model."
        )


def lora_targets(model: PreTrainedModel, wanted: Sequence[str] | None) -> list[str]:
    """Return the names of the layers to adapt, in PEFT's form.

    Args:
        model: May be on the meta device.
        wanted: Names or last parts of names; None takes every linear layer of the decoder but those of
            `LEFT_WHOLE` and the experts of a mixture.

    Raises:
        QeRLError: No layer has one of the names, or the decoder has no linear layers.
    """
    decoder = model.get_decoder()
    experts = tuple(f"{name}." for name, _ in experts_of(decoder))
    names = [
        name
        for name, module in decoder.named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    ]
    linears = dict.fromkeys(name.rpartition(".")[2] for name in names)
    if wanted is None:
        if not linears:
            raise QeRLError(f"{type(model).__name__} has no linear layers to adapt; use another family.")
        routed = {name.rpartition(".")[2] for name in names if name.startswith(experts)}
        own = [name.split(".") for name in names if not name.startswith(experts)]
        # If linears of experts have the same last name, the name of the parent module tells them apart.
        chosen = [".".join(words[-2:] if words[-1] in routed else words[-1:]) for words in own]
        return [end for end in dict.fromkeys(chosen) if end.rpartition(".")[2] not in LEFT_WHOLE]
    parts = [name.split(".") for name, _ in model.named_modules()]
    ends = {".".join(words[start:]) for words in parts for start in range(len(words))}
    if unknown := [name for name in wanted if name not in ends]:
        raise QeRLError(
            f"lora_target_modules names {', '.join(unknown)}, which {type(model).__name__} does not have; "
            f"its decoder's linear layers are {', '.join(linears)}."
        )
    return list(wanted)
