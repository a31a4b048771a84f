"""Checks of a data set's prompts: each has the form of one, the chat template renders it, and it is short
enough and leaves the model positions for the completion.

A message's content may come in parts, as images need them. Parts that are all text are joined, because many
templates of text models add the content to a text, which fails on a list, and some leave it out.
"""

import logging
import operator
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.families.sizes import positions_of
from qerl.models.chat import Chat, content_of
from qerl.models.hub import LocalModel
from qerl.models.load import model_positions
from qerl.ranks import is_first_process
from qerl.settings.config import QeRLConfig

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 1000
"""Rows per read; row by row, reading takes ten times as long."""


def sound_prompts(rows: Any, what: str) -> Any:
    """Return the rows of a data set, the contents of all prompts as text: parts of text are joined.

    Args:
        rows: A `Dataset` or `IterableDataset`, several by name in a dictionary, or None. Rows without a
            column `prompt` are left to an environment; rows of a stream are checked when they are read.
        what: Name of the rows, such as ``train_dataset``.

    Raises:
        QeRLError: A row has no prompt, or one that is neither text nor messages with a role and a content.
    """
    if isinstance(rows, dict):
        return {name: sound_prompts(some, f"{what} {name!r}") for name, some in rows.items()}
    if isinstance(rows, IterableDataset):
        return rows.map(lambda row: _sound_row(row, f"A row of {what}"))
    if not isinstance(rows, Dataset) or "prompt" not in rows.column_names:
        return rows
    joined = [
        sound is not prompt
        for number, prompt in enumerate(_prompts(rows))
        for sound in [sound_messages(prompt, f"Row {number} of {what}")]
    ]
    if not any(joined):
        return rows
    return rows.map(lambda row: _sound_row(row, what))


def _prompts(rows: Dataset) -> Iterator[Any]:
    for batch in rows.with_format(None).select_columns("prompt").iter(_READ_AT_ONCE):
        yield from batch["prompt"]


def _sound_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    return {"prompt": sound_messages(row["prompt"], where)} if "prompt" in row else {}


def _of_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the message itself, or a copy whose parts are joined."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    return message | {"content": content_of(message, where)}


def sound_messages(
    value: Any, where: str, column: str = "prompt", sound: Callable[[Any, str], Any] = _of_text
) -> Any:
    """Return a column's value itself if it is text or sound messages, else a list in which unsound messages
    are replaced.

    Args:
        value: The column's value in the row.
        where: The row, such as ``Row 3 of train_dataset``.
        column: Name of the column.
        sound: Returns a message with a role itself if it is sound, else a sound one; its second argument is
            ``where``.

    Raises:
        QeRLError: The value is neither text nor messages with a role, or `sound` refuses a message.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise QeRLError(f"{where} has no {column} (it is None); give it one, or leave the row out.")
    if not isinstance(value, list) or not value or not all(map(_has_a_role, value)):
        raise QeRLError(
            f"{where} has a {column} that is neither text nor chat messages but {reprlib.repr(value)}; make "
            'it a text, or a list such as [{"role": "user", "content": ...}].'
        )
    found = [sound(message, where) for message in value]
    return value if all(map(operator.is_, found, value)) else found


def _has_a_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def check_template(
    rows: Any, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None
) -> None:
    """Raise if the chat template cannot render the prompts.

    The first prompt of each sequence of roles is rendered; of a stream, only the first row.

    Args:
        rows: Result of `sound_prompts`.
        tokenizer: Has the template; without one prompts are text.
        template_kwargs: Arguments of the chat template.

    Raises:
        QeRLError: The template cannot render one of them.
    """
    if isinstance(rows, dict):
        for some in rows.values():
            check_template(some, tokenizer, template_kwargs)
        return
    stream = isinstance(rows, IterableDataset)
    mapped = isinstance(rows, Dataset) and "prompt" in rows.column_names
    if tokenizer.chat_template is None or not (stream or mapped):
        return
    chat = Chat(tokenizer, template_kwargs)
    tried: set[tuple[str, ...]] = set()
    for prompt in (row.get("prompt") for row in rows.take(1)) if stream else _prompts(rows):
        if isinstance(prompt, list) and (roles := tuple(message["role"] for message in prompt)) not in tried:
            chat.check(prompt)
            tried.add(roles)


@dataclass(frozen=True)
class ReadyPrompts:
    """Keeps the rows whose prompts are short enough, and raises for prompts that the template cannot render
    or the model has no positions for.

    Attributes:
        args: Settings of the run.
        tokenizer: The model's tokenizer.
        positions: Positions of the model; None where nothing limits completions.
    """

    args: QeRLConfig
    tokenizer: PreTrainedTokenizerBase
    positions: int | None

    @classmethod
    def of(
        cls, model: Any, args: QeRLConfig, tokenizer: PreTrainedTokenizerBase, in_turns: bool
    ) -> "ReadyPrompts":
        """Return the checks for a model and the settings.

        Args:
            model: A loaded model, or a `LocalModel`, whose weights are not read.
            args, tokenizer: As the attributes.
            in_turns: Whether tools, environments or a `rollout_func` take part: their samples end at the last
                position, or where they choose.

        Raises:
            QeRLError: The model is damaged.
        """
        if in_turns:
            positions = None
        elif isinstance(model, LocalModel):
            positions = model_positions(model, args.trust_remote_code)
        else:
            positions = positions_of(base_model(model).config.get_text_config(decoder=True))
        return cls(args, tokenizer, positions)

    def __call__(self, rows: Any, what: str) -> Any:
        """Return the rows that pass; ``what`` names them, such as ``training prompts``.

        Raises:
            QeRLError: As `check_template`, `short_prompts` and `check_room`.
        """
        kwargs = self.args.chat_template_kwargs
        check_template(rows, self.tokenizer, kwargs)
        rows = short_prompts(rows, self.args.max_prompt_length, kwargs, self.tokenizer, what)
        check_room(rows, self.positions, self.args, self.tokenizer, what)
        return rows


def short_prompts(
    rows: Any,
    limit: int | None,
    template_kwargs: dict[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase,
    what: str,
) -> Any:
    """Return the rows of a data set whose prompt has at most ``limit`` tokens; the number of longer ones is
    logged.

    Args:
        rows: A `Dataset` or `IterableDataset` with a column `prompt`, text or messages; several by name in a
            dictionary; or None.
        limit: Maximum number of tokens of a prompt; None keeps all rows.
        template_kwargs: Arguments of the chat template.
        tokenizer: Counts the tokens of a prompt, chat template included.
        what: Name of the rows, such as ``training prompts``.

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
        return _tokens(row.get("prompt") or "", tokenizer, chat) <= limit  # an environment may give it

    kept = rows.filter(short)
    if isinstance(rows, IterableDataset):
        return kept
    if len(rows) and not len(kept):
        raise QeRLError(
            f"None of the {len(rows)} {what} has at most {limit} tokens; raise max_prompt_length."
        )
    if len(kept) < len(rows) and is_first_process():
        logger.warning(
            "%d of %d %s are longer than %d tokens and are left out.",
            *(len(rows) - len(kept), len(rows), what, limit),
        )
    return kept


def _tokens(prompt: Any, tokenizer: PreTrainedTokenizerBase, chat: Chat | None) -> int:
    if isinstance(prompt, str) or chat is None:
        return len(tokenizer(prompt)["input_ids"])
    return len(chat.ids(prompt))


def check_room(
    rows: Any, positions: int | None, args: QeRLConfig, tokenizer: PreTrainedTokenizerBase, what: str
) -> None:
    """Raise if a prompt with its completion has more tokens than the model has positions.

    A text has at most as many tokens as bytes, so that few prompts need to be tokenized.

    Args:
        rows: Result of `sound_prompts`; prompts of a stream are checked when they are sampled from.
        positions: Positions of the model; None where it sets no limit.
        args: Settings of the run.
        tokenizer: Counts the tokens of a prompt, chat template included.
        what: Name of the rows, such as ``training prompts``.

    Raises:
        QeRLError: A prompt leaves too few positions, or `max_completion_length` alone takes them all.
    """
    if positions is None or rows is None:
        return
    completion = args.max_completion_length or 0
    if completion >= positions:
        raise QeRLError(
            f"max_completion_length is {completion} and the model has {positions} positions for a prompt and "
            "its completion; lower max_completion_length."
        )
    if isinstance(rows, dict):
        for name, some in rows.items():
            check_room(some, positions, args, tokenizer, f"{what} of {name!r}")
    if not isinstance(rows, Dataset) or "prompt" not in rows.column_names:
        return
    chat = Chat(tokenizer, args.chat_template_kwargs) if tokenizer.chat_template else None
    framed: dict[tuple[str, ...], int] = {}  # tokens of the first prompt of these roles, frame included
    for prompt in _prompts(rows):
        roles = () if isinstance(prompt, str) else tuple(message["role"] for message in prompt)
        if roles not in framed:
            framed[roles] = _tokens(prompt, tokenizer, chat)
        most = framed[roles] + len(str(prompt).encode("utf-8", "surrogatepass"))
        if most <= positions - completion:
            continue
        tokens = _tokens(prompt, tokenizer, chat)
        if tokens + completion > positions:
            raise QeRLError(
                f"One of the {what} has {tokens} tokens, which with a completion of up to {completion} "
                f"exceed the {positions} positions of the model; lower max_completion_length, or set "
                f"max_prompt_length: {positions - completion}, which leaves longer prompts out."
            )
