"""Which prompts of a data set are short enough."""

import logging
from typing import Any

from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.models.chat import Chat
from qerl.ranks import is_first_process

logger = logging.getLogger(__name__)


def short_prompts(
    rows: Any,
    limit: int | None,
    template_kwargs: dict[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    what: str,
) -> Any:
    """The rows of a data set whose prompt has at most ``limit`` tokens; how many have more is logged.

    Args:
        rows: A `Dataset` or `IterableDataset` with a column `prompt`, text or messages; several by name in a
            dictionary; or None.
        limit: Most tokens of a prompt; None keeps all rows.
        template_kwargs: Arguments of the chat template.
        tokenizer: Counts the tokens of a prompt, chat template included.
        what: What the rows are, such as ``training prompts``.

    Raises:
        QeRLError: No row is left.
    """
    if limit is None or rows is None:
        return rows
    if isinstance(rows, dict):
        return {
            name: short_prompts(some, limit, template_kwargs, tokenizer, f"{what} of {name!r}")
            for name, some in rows.items()
        }
    chat = Chat(tokenizer, template_kwargs) if tokenizer.chat_template else None

    def short(row: dict[str, Any]) -> bool:
        prompt = row.get("prompt", "")  # an environment may give it
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) or chat is None else chat.ids(prompt)
        return len(ids) <= limit

    kept = rows.filter(short)
    if isinstance(rows, IterableDataset):
        return kept
    if not len(kept):
        raise QeRLError(
            f"None of the {len(rows)} {what} has at most {limit} tokens; raise max_prompt_length."
        )
    if len(kept) < len(rows) and is_first_process():
        logger.warning(
            "%d of %d %s are longer than %d tokens and are left out.",
            *(len(rows) - len(kept), len(rows), what, limit),
        )
    return kept
