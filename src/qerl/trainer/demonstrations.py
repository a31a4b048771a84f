"""Demonstrations as tokens and labels, which `algorithm: sft` trains on as TRL's `SFTTrainer` does.

A row has `messages`, or a `prompt` and its `completion`, both chat messages or both text. Labels are the
token ids, and `IGNORE` at tokens without a loss. By default the loss covers the assistant's turns in
`messages` (`qerl.models.chat.Chat.turns`), and the completion of a prompt. Text is followed by the
end-of-sequence token.

The prompt's tokens in a demonstration must be exactly those that the model is prompted with. If they are not,
because the template renders the prompt differently or tokens merge across its end, the row is refused; TRL
warns and trains on another prompt.
"""

import itertools
import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.models.chat import Chat, plain_message
from qerl.ranks import is_first_process
from qerl.settings.config import QeRLConfig
from qerl.tasks.demonstrations import COLUMNS, UNREAD
from qerl.trainer.prompts import short_prompts, sound_messages
from qerl.update.packed_row import IGNORE

logger = logging.getLogger(__name__)

READY = ("input_ids", "labels", "loss_tokens")
"""Columns of prepared rows: token ids [T], labels [T], and the number of labels that the loss counts."""

ADDED = ("completion", "messages", *READY)
"""Columns of a row beyond those of RL."""

_LOOKED_AT = 1000
"""Rows that are searched for ends of turns: a template that leaves them out does so in every row."""

_BEHIND_END = 4
"""Last tokens of a turn that are searched for its stop token: templates write line breaks behind it."""

_LENGTH = "tokens before it was cut"


def check_columns(rows: Any, what: str) -> None:
    """Raise if rows are not a data set of demonstrations.

    Raises:
        QeRLError: It is not a `Dataset` (a stream, for example), is empty, is tokenized already, lacks the
            columns, or has a column that TRL renders with and this project does not.
    """
    if not isinstance(rows, Dataset):
        raise QeRLError(
            f"{what} is a {type(rows).__name__}; algorithm: sft learns from a Dataset, so pass one."
        )
    columns = rows.column_names
    if "input_ids" in columns:
        raise QeRLError(
            f"{what} has the column input_ids, but demonstrations are tokenized here; remove it, and give "
            "`messages`, or `prompt` and `completion`."
        )
    if "messages" not in columns and not {"prompt", "completion"} <= {*columns}:
        raise QeRLError(
            f"{what} has neither the column `messages` nor `prompt` and `completion`, only "
            f"{', '.join(columns)}; rename or make them with `map`."
        )
    if unread := [name for name in UNREAD if name in columns]:
        raise QeRLError(
            f"{what} has the column {unread[0]}, which QeRL does not use in rendering demonstrations; drop "
            "the rows that need it, then the column with `remove_columns`."
        )
    if not len(rows):
        raise QeRLError(f"{what} has no row; check how it was filtered.")


def check_prompts(rows: Any) -> None:
    """Raise if a held-out row has no prompt to sample from.

    Args:
        rows: Prepared rows; several sets by name, or None.

    Raises:
        QeRLError: A row has no prompt.
    """
    for some in rows.values() if isinstance(rows, dict) else [rows]:
        if some is not None and ("prompt" not in some.column_names or None in some["prompt"]):
            raise QeRLError(
                "Reward functions need held-out prompts to sample from, but held-out rows have `messages`; "
                "give them as `prompt` and `completion`, or leave reward functions out."
            )


def warn_of_endless_turns(rows: Dataset, stop_tokens: Set[int], max_length: int | None) -> None:
    """Warn if trained turns lack a stop token, for example if ``{% generation %}`` marks the content alone.

    Args:
        rows: Prepared rows.
        stop_tokens: Tokens that end a completion.
        max_length: Length to which rows were truncated; the last turn of a truncated row is not checked.
    """
    looked = rows.select(range(min(len(rows), _LOOKED_AT)))["labels"]
    endless = 0
    for labels in looked:
        found = itertools.groupby(labels, IGNORE.__ne__)
        turns = [list(turn) for counts, turn in found if counts]
        if len(labels) == max_length and labels[-1] != IGNORE:
            turns.pop()
        endless += any(stop_tokens.isdisjoint(turn[-_BEHIND_END:]) for turn in turns)
    if endless and is_first_process():
        logger.warning(
            "In %d of the first %d demonstrations, a trained turn does not end with a stop token (%s), so "
            "the model may not learn to stop; put the end of turn inside {%% generation %%} of the chat "
            "template, or name the token that the template writes as eos_token_id in generation_config.json.",
            *(endless, len(looked), ", ".join(map(str, sorted(stop_tokens)))),
        )


def _plain(rows: Dataset, what: str) -> Dataset:
    """Return the rows with text parts joined; raise if a message has more than role and content."""
    columns = [name for name in COLUMNS if name in rows.column_names]

    def plain(row: dict[str, Any], number: int) -> dict[str, Any]:
        where, given = f"Row {number} of {what}", {name: row[name] for name in columns}
        return {
            name: None if value is None else sound_messages(value, where, name, plain_message)
            for name, value in given.items()
        }

    return rows.map(plain, with_indices=True)


@dataclass(frozen=True)
class ReadyDemonstrations:
    """Preparation of rows: adds the columns `READY`, truncated to `max_length`.

    Attributes:
        args: Settings of the run.
        tokenizer: The model's tokenizer.
        positions: Number of the model's positions; None if it sets no limit.
    """

    args: QeRLConfig
    tokenizer: PreTrainedTokenizerBase
    positions: int | None

    def __call__(self, rows: Any, what: str) -> Any:
        """Return the prepared rows. None and prepared rows are returned as they are.

        Args:
            rows: Demonstrations; several sets by name in a dictionary.
            what: Name of the rows in messages, such as ``training demonstrations``.

        Raises:
            QeRLError: The rows are not demonstrations, one cannot be rendered or is longer than the model's
                positions, or nothing is left to learn from.
        """
        columns = getattr(rows, "column_names", None) or ()
        if rows is None or {*READY} <= {*columns}:
            return rows
        if isinstance(rows, dict):
            return {name: self(some, f"{what} of {name!r}") for name, some in rows.items()}
        check_columns(rows, f"The data set of {what}")
        args, chat = self.args, None
        if self.tokenizer.chat_template is not None:
            chat = Chat(self.tokenizer, args.chat_template_kwargs)
        rows = _plain(rows, f"the {what}")
        rows = short_prompts(rows, args.max_prompt_length, args.chat_template_kwargs, self.tokenizer, what)

        def ready(row: dict[str, Any], number: int) -> dict[str, Any]:
            try:
                ids, labels = self._labelled(row, chat)
                if self.positions is not None and len(ids[: args.max_length]) > self.positions:
                    raise QeRLError(
                        f"It has {len(ids)} tokens and the model {self.positions} positions; set max_length: "
                        f"{self.positions}, which cuts it."
                    )
            except QeRLError as error:
                raise QeRLError(f"Row {number} of the {what}: {error}") from error
            ids_T, labels_T = ids[: args.max_length], labels[: args.max_length]
            counted = sum(label != IGNORE for label in labels_T[1:])  # no position predicts the first token
            return dict(zip(READY, (ids_T, labels_T, counted), strict=True)) | {_LENGTH: len(ids)}

        found = rows.map(ready, with_indices=True)
        kept = found.filter(lambda counted: counted > 0, input_columns="loss_tokens")
        if not len(kept):
            raise QeRLError(
                f"Nothing is left to learn from: none of the {len(rows)} {what} has a token with a loss "
                f"within max_length ({args.max_length}); raise it."
            )
        cut = 0 if args.max_length is None else sum(n > args.max_length for n in found[_LENGTH])
        if (cut or len(kept) < len(rows)) and is_first_process():
            logger.warning(
                "Of %d %s, %d have more than max_length (%s) tokens and are cut, and %d are left out because "
                "none of their tokens has a loss.",
                *(len(rows), what, cut, args.max_length, len(rows) - len(kept)),
            )
        return kept.remove_columns(_LENGTH)

    def _labelled(self, row: dict[str, Any], chat: Chat | None) -> tuple[list[int], list[int]]:
        args, only = self.args, self.args.assistant_only_loss
        start, written = 0, None
        if row.get("messages") is not None:
            if args.completion_only_loss:
                raise QeRLError("completion_only_loss needs prompt and completion, and this has messages.")
            chat = self._needed(chat)
            whole, written = (
                (chat.whole(row["messages"]), None) if only is False else chat.turns(row["messages"])
            )
        elif isinstance(prompt := row.get("prompt"), str) and isinstance(text := row.get("completion"), str):
            if only:
                raise QeRLError("assistant_only_loss needs chat messages, and this is text.")
            end = self._end()
            prompt_ids = self.tokenizer(prompt)["input_ids"]
            whole = self.tokenizer(prompt + text + ("" if text.endswith(end) else end))["input_ids"]
            if whole[: len(prompt_ids)] != prompt_ids:
                raise QeRLError(
                    "A token spans the end of the prompt and the start of the completion, unlike in "
                    "generation; end the prompt elsewhere, for example before a space."
                )
            start = len(prompt_ids)
        elif isinstance(prompt, list) and isinstance(said := row.get("completion"), list):
            chat = self._needed(chat)
            whole, written = chat.turns([*prompt, *said]) if only else (chat.whole([*prompt, *said]), None)
            start = chat.before(prompt, whole)
        else:
            raise QeRLError(
                "it has neither messages nor a prompt and a completion of the same kind (text or chat)."
            )
        if args.completion_only_loss is False:
            start = 0
        labels = [
            token if at >= start and (written is None or written[at]) else IGNORE
            for at, token in enumerate(whole)
        ]
        return whole, labels

    def _end(self) -> str:
        """Return the end-of-sequence token, which follows a text.

        Raises:
            QeRLError: The tokenizer has none, or also appends it to prompts.
        """
        end = self.tokenizer.eos_token
        if end is None:
            raise QeRLError(
                "it is text, and the tokenizer has no EOS token that would end it; add it to "
                "tokenizer_config.json."
            )
        if self.tokenizer("a")["input_ids"][-1] == self.tokenizer.eos_token_id:
            raise QeRLError(
                f"it is text, and the tokenizer appends {end} to every text, also to prompts, so no "
                "completion could follow; set add_eos_token: false in tokenizer_config.json."
            )
        return end

    def _needed(self, chat: Chat | None) -> Chat:
        if chat is None:
            raise QeRLError("it is chat messages, and the tokenizer has no chat template; set one.")
        return chat
