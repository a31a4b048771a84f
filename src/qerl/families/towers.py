"""The text decoder of a model for images or sound, the form of most checkpoints published today.

Such a model is a wrapper, a ``*ForConditionalGeneration`` whose config has a ``text_config``. Its text
decoder alone trains here: the causal LM of that config, made of the wrapper's tensors. These have been
published under two namings, and the causal LM has a third:

    language_model.model.layers.0...    language_model.lm_head.weight    Gemma 3, Mistral 3
    model.language_model.layers.0...    lm_head.weight                   Gemma 4, Qwen3-VL; the wrapper's own
    model.layers.0...                   lm_head.weight                   the causal LM

Everything under other names belongs to towers of images or sound, their projectors or layers that predict
several tokens (MTP), and is not read. An adapter is saved under the wrapper's own names
(`qerl.lora.adapter`), so that it fits the model as it was published.

The text decoders of Qwen2.5-VL and Qwen3-VL have no causal LM in transformers and need none: on text their
three positions per token are equal, and then they are a Qwen2 and a Qwen3.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any, cast

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from qerl.errors import QeRLError, first_line

WRAPPED = "model.language_model."
"""Prefix of the decoder's names in the wrapper's classes; ``model.`` in the causal LM."""

_DECODER = re.compile(
    r"(?:model\.)?language_model\.(?:model\.)?|model\.(?=layers\.|embed_tokens\.|norm\.)|(?=lm_head\.)"
)
_TO_CAUSAL_LM = {f"^{re.escape(WRAPPED)}": "model."}
_SAME_ON_TEXT = {"qwen3_vl_text": "qwen3", "qwen2_5_vl_text": "qwen2"}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the causal LM: that of a wrapper's text decoder, or the config itself."""
    if getattr(config, "text_config", None) is None or config.is_encoder_decoder:
        return config
    text = copy.deepcopy(config.get_text_config(decoder=True))
    if same := _SAME_ON_TEXT.get(text.model_type):
        fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = fields.pop("rope_parameters", None) or {}
        kept = {
            name: value for name, value in rope.items() if name != "type" and not name.startswith("mrope")
        }
        if kept.get("rope_type") == "mrope":
            kept["rope_type"] = "default"
        text = CONFIG_MAPPING[same](**fields, rope_parameters=kept)
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)  # the wrapper's setting applies
    text.dtype = config.dtype
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return cast(PreTrainedConfig, text)


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Apply `text_config` to the content of a config.json.

    Raises:
        QeRLError: A wrapper's fields are not a valid config.
    """
    if not isinstance(fields.get("text_config"), dict):
        return fields
    try:
        return text_config(AutoConfig.for_model(**fields)).to_dict()
    except Exception as error:  # only the file can be at fault, and validators raise their own classes
        family = fields.get("model_type")
        raise QeRLError(
            f"The config.json of this {family} model is not valid ({first_line(error)}); fix it."
        ) from error


def decoder_name(stored: str) -> str | None:
    """Return the name in the causal LM of a wrapper's tensor or module; None outside of its text decoder."""
    found = _DECODER.match(stored)
    if found is None:
        return None
    rest = stored[found.end() :]
    return rest if f"{rest}.".startswith("lm_head.") else f"model.{rest}"


def spellings(module: str) -> tuple[str, ...]:
    """The names that a module of the causal LM may have in a published folder, its own first."""
    rest = module.removeprefix("model.")
    return module, f"{WRAPPED}{rest}", f"language_model.{module}"


def remember_wrapper(model: PreTrainedModel) -> None:
    """Mark a causal LM as a wrapper's, in the attribute that PEFT reads when it loads an adapter."""
    model._checkpoint_conversion_mapping = _TO_CAUSAL_LM


def of_wrapper(model: object) -> bool:
    """Return True if `remember_wrapper` has marked the model."""
    return getattr(model, "_checkpoint_conversion_mapping", None) == _TO_CAUSAL_LM
