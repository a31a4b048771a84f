"""One completion as TRL hands it to reward functions. Tied to trl 1.16, which decodes all of them at once."""

from typing import Any

from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational


def decoded(trainer: GRPOTrainer, prompt: Any, prompt_ids: list[int], token_ids: list[int]) -> Any:
    """The completion of a prompt: a text, or chat messages where the prompt has messages.

    Args:
        trainer: Its tokenizer decodes; it has no tools.
        prompt: Text or chat messages.
        prompt_ids, token_ids: Tokens of the prompt and of the completion.
    """
    tokenizer = trainer._tokenizer
    chat = is_conversational({"prompt": prompt})
    if chat and any(
        getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")
    ):
        return [parse_response(tokenizer, token_ids, prefix=prompt_ids, tools=trainer.tools)]
    (text,) = trainer.processing_class.batch_decode([token_ids], skip_special_tokens=True)
    return [{"role": "assistant", "content": text}] if chat else text
