"""Prompts of a data set: that each is one, that the chat template renders them, which are short enough, and
that the model has positions for what follows.

A message's content may come in parts, as images need them. Of text alone the parts are joined, because many
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
"""Rows; read one by one they take ten times as long."""


def sound_prompts(rows: Any, what: str) -> Any:
    """The rows of a data set, each with a prompt whose contents are text: parts of text are joined.

    Args:
        rows: A `Dataset` or `IterableDataset`, several by name in a dictionary, or None. Rows without a
            column `prompt` are left to an environment; those of a stream are looked at when they are read.
        what: What the rows are, such as ``train_dataset``.

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
    """The message itself, or one whose parts are joined."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    return message | {"content": content_of(message, where)}


def sound_messages(
    value: Any, where: str, column: str = "prompt", sound: Callable[[Any, str], Any] = _of_text
) -> Any:
    """A column's value itself where it is text or sound messages, else with sound ones in their place.

    Args:
        value: What the row has.
        where: The row, such as ``Row 3 of train_dataset``.
        column: Name of the column.
        sound: Gives a sound message for one with a role, or itself; its second argument is ``where``.

    Raises:
        QeRLError: It is neither text nor messages with a role, or `sound` refuses a message.
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
    """Refuse a chat template that cannot render the prompts: tried with the first of each sequence of roles,
    of a stream with the first of all.

    Args:
        rows: What `sound_prompts` gives.
        tokenizer: Has the template; without one prompts are text.
        template_kwargs: Arguments of the chat template.

    Raises:
        QeRLError: It cannot render one of them.
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
    """Gives the rows whose prompts are short enough, and refuses such as the template cannot render or the
    model has no positions for.

    Attributes:
        args: Settings of the run.
        tokenizer: Of the model.
        positions: Of the model; None where nothing limits completions.
    """

    args: QeRLConfig
    tokenizer: PreTrainedTokenizerBase
    positions: int | None

    @classmethod
    def of(
        cls, model: Any, args: QeRLConfig, tokenizer: PreTrainedTokenizerBase, in_turns: bool
    ) -> "ReadyPrompts":
        """What a model and the settings ask for.

        Args:
            model: One in hand, or a `LocalModel`, of which no weights are read.
            args, tokenizer: As the attributes.
            in_turns: Whether tools, environments or a `rollout_func` take part: what they sample ends where
                the positions do, or where they say.

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
        """Those of these rows; ``what`` they are called, such as ``training prompts``.

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
    """Refuse prompts that with their completions have more tokens than the model has positions.

    A text has at most as many tokens as bytes, so that few prompts need to be tokenized.

    Args:
        rows: What `sound_prompts` gives; those of a stream are found when they are sampled from.
        positions: Of the model; None where it sets no limit.
        args: Settings of the run.
        tokenizer: Counts the tokens of a prompt, chat template included.
        what: What the rows are, such as ``training prompts``.

    Raises:
        QeRLError: A prompt leaves too little room, or none can leave enough.
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
