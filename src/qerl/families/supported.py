"""Supported model families, as far as a config and names of tensors tell: before weights are read.

The trainer measures the rest before its first step (`qerl.update.row_check`).
"""

import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedConfig, PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.parts import WITH_STATE

_BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types whose attention depends on nothing but who may see whom."""

LEFT_WHOLE = frozenset({"in_proj_a", "in_proj_b"})
"""Last names of linears that are neither quantised nor, unless somebody names them, adapted: in a gated delta
net those of the decay and the rate, with one output per head. They are a thousandth of the layer, and what
they give is exponentiated or summed over all tokens that follow."""


def why_not(config: PreTrainedConfig, model_class: type) -> str | None:
    """The reason why no model of this config and class (transformers' causal LM) can be trained here; else
    None."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return (
            f"{model_class.__name__} is an encoder-decoder, of which no prompt can be shared by its samples"
        )
    kind_with_state = WITH_STATE.get(text.model_type)
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _BY_POSITION - {kind_with_state})
    if others or (getattr(model_class, "_is_stateful", False) and not kind_with_state):
        kind = f" ({others[0]})" if others else ""
        return (
            f"{model_class.__name__} has layers{kind} that carry a state from token to token, or choose what "
            "they attend to, which samples packed behind one prompt cannot share"
        )
    return None


_EXPERT = re.compile(r"(?:^|[._])experts?(?:[._]|$)")


def check_dense(family: str, names: Iterable[str]) -> None:
    """Raise for a mixture of experts, recognised by the names of its tensors.

    Raises:
        QeRLError: One of them belongs to an expert.
    """
    expert = next((name for name in names if _EXPERT.search(name)), None)
    if expert is not None:
        raise QeRLError(
            f"{family} is a mixture of experts ({expert}), whose experts are neither quantised nor adapted "
            "and whose router loss is not computed; use a dense model."
        )


def lora_targets(model: PreTrainedModel, wanted: Sequence[str] | None) -> list[str]:
    """Names of the layers to adapt, as PEFT takes them.

    Args:
        model: May be without memory (on the meta device).
        wanted: Names or last parts of names; None takes every linear layer of the decoder but those of
            `LEFT_WHOLE`.

    Raises:
        QeRLError: A name that no layer has, or a decoder without linear layers.
    """
    linears = {
        name.rpartition(".")[2]: None
        for name, module in model.get_decoder().named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    if wanted is None:
        if not linears:
            raise QeRLError(f"{type(model).__name__} has no linear layers to adapt; use another family.")
        return [name for name in linears if name not in LEFT_WHOLE]
    parts = [name.split(".") for name, _ in model.named_modules()]
    ends = {".".join(words[start:]) for words in parts for start in range(len(words))}
    if unknown := [name for name in wanted if name not in ends]:
        raise QeRLError(
            f"lora_target_modules names {', '.join(unknown)}, which {type(model).__name__} does not have; "
            f"its decoder's linear layers are {', '.join(linears)}."
        )
    return list(wanted)
