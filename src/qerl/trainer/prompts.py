"""Which prompts of a data set are short enough."""

import logging
from typing import Any

from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.models.chat import Chat

logger = logging.getLogger(__name__)


def short_prompts(
    rows: Any, limit: int | None, template_kwargs: dict[str, Any] | None, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """The rows of a data set whose prompt has at most ``limit`` tokens; how many have more is logged.

    Args:
        rows: A `Dataset` or `IterableDataset` with a column `prompt`, text or messages.
        limit: Most tokens of a prompt; None keeps all rows.
        template_kwargs: Arguments of the chat template.
        tokenizer: Counts the tokens of a prompt, chat template included.

    Raises:
        QeRLError: No row is left.
    """
    if limit is None:
        return rows
    chat = Chat(tokenizer, template_kwargs) if tokenizer.chat_template else None

    def short(row: dict[str, Any]) -> bool:
        prompt = row["prompt"]
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) or chat is None else chat.ids(prompt)
        return len(ids) <= limit

    kept = rows.filter(short)
    if isinstance(rows, IterableDataset):
        return kept
    if not len(kept):
        raise QeRLError(f"No prompt has at most {limit} tokens; raise max_prompt_length.")
    if len(kept) < len(rows):
        logger.warning(
            "%d of %d prompts are longer than %d tokens and are left out.",
            *(len(rows) - len(kept), len(rows), limit),
        )
    return kept
