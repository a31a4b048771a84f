"""Which model families are taken, as far as a config and names of tensors tell: before weights are read.

What they do not tell, the trainer measures before its first step (`qerl.trainer.row_check`).
"""

from transformers import PreTrainedConfig

_BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types whose attention depends on nothing but who may see whom."""


def refusal(config: PreTrainedConfig, model_class: type) -> str | None:
    """Why no model of this class and config can be trained here, or None where nothing speaks against it.

    Args:
        config: The model's.
        model_class: transformers' class of the causal LM.
    """
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return (
            f"{model_class.__name__} is an encoder-decoder, of which no prompt can be shared by its samples"
        )
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _BY_POSITION)
    if getattr(model_class, "_is_stateful", False) or others:
        kind = f" ({others[0]})" if others else ""
        return (
            f"{model_class.__name__} has layers{kind} that carry a state from token to token, or choose what "
            "they attend to, which samples packed behind one prompt cannot share"
        )
    return None
