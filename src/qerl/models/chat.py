"""Prompts as a model's chat template renders them: one place for training, evaluation and single answers.

A task asks for its form in a system message, and templates differ in what they do with one. Most write it,
Gemma's first templates and Mistral's older ones raise an error, and some drop it without a word, so that the
model is rewarded for a form that its prompt never mentions. Here the template is tried with a mark in every
message. A system message that does not come out is folded: it is put in front of the next user message, as
templates without a system role do themselves. Any other message that does not come out, and a template that
cannot be rendered, is an error before the run starts.

Folding happens in the data set, because TRL renders the prompts of a training run itself: from messages that
the template takes as they are, both get the same tokens.

Templates of reasoning models write ``<think>`` at the end of the prompt, so a completion begins within the
thinking. :attr:`Chat.opening` says so; a task that knows it judges the whole turn of the assistant.

Given up: the template is tried once for each sequence of roles, so one that drops a system message because of
its content is not found out.
"""

import inspect
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from qerl.errors import QeRLError, first_line
from qerl.ranks import is_first_process

logger = logging.getLogger(__name__)

Message = dict[str, str]

THINK = "<think>"
_MARK = "message{}mark"

_ENDED = {"return_dict": True, "add_generation_prompt": False}

_FOLDED = "the prompt as its template takes it"

# What transformers' function takes itself; a template's own arguments have other names.
_TAKEN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents",
    "kwargs",
}


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """The messages without system messages: the text of each begins the user message that follows it."""
    folded: list[Message] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(message["content"])
        elif message["role"] == "user" and pending:
            folded.append({"role": "user", "content": "\n\n".join([*pending, message["content"]])})
            pending = []
        else:
            folded.append(message)
    return folded


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, whose parts are joined.

    Args:
        content: Text, or parts as models for images take them.
        where: What has the message.

    Raises:
        QeRLError: A part is an image or anything else that is no text.
    """
    texts = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind != "text" or not isinstance(text, str):
            odd = kind if kind not in (None, "text") else reprlib.repr(part)
            raise QeRLError(
                f"{where} has a message with a part that is no text ({odd}); models read text alone here, so "
                "leave such prompts out."
            )
        texts.append(text)
    return "".join(texts)


def content_of(message: Mapping[str, Any], where: str) -> str:
    """The content of a message as text; arguments and errors as `text_of`, and none is refused, too."""
    content = message.get("content")
    if content is None:
        raise QeRLError(
            f"{where} has a message without content (role {message['role']}); give it a text, or leave it "
            "out."
        )
    return text_of(content if isinstance(content, str | list) else [content], where)


def plain_message(message: Mapping[str, Any], where: str) -> Message:
    """Role and content of a message that says nothing else, the content as text.

    Args:
        message: Its keys may be more where they hold nothing, as in a data set of which other rows have them.
        where: What has the message.

    Raises:
        QeRLError: Another key holds something, as `tool_calls` or `reasoning_content` do, or as `content_of`.
    """
    others = [
        name
        for name, value in message.items()
        if name not in ("role", "content") and value not in (None, "", [], {})
    ]
    if others:
        raise QeRLError(
            f"{where} has a message with {', '.join(others)} (role {message['role']}), and role and content "
            "alone are read here; write it into the content, or leave the row out."
        )
    return {"role": message["role"], "content": content_of(message, where)}


class Chat:
    """The chat template of a tokenizer, with the arguments that every prompt of a run gets.

    Args:
        tokenizer: With a chat template.
        template_kwargs: The template's own arguments, such as ``enable_thinking``; TRL's field
            ``chat_template_kwargs``.

    Raises:
        QeRLError: An argument is one that transformers takes itself.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._folds: dict[tuple[str, ...], bool] = {}
        taken = sorted(_TAKEN & self._kwargs.keys())
        if taken:
            raise QeRLError(
                f"chat_template_kwargs sets {', '.join(taken)}, which is not the chat template's to decide; "
                "give arguments of the template alone, such as enable_thinking."
            )

    @cached_property
    def opening(self) -> str:
        """The end of a prompt that belongs to the assistant's turn: ``<think>`` where it opens one, else
        nothing."""
        mark = _MARK.format(0)
        turn = self._render([{"role": "user", "content": mark}]).rpartition(mark)[2]
        return THINK if turn.rfind(THINK) > turn.rfind("</think>") else ""

    def messages(self, prompt: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them: themselves, or with the system message folded.

        Raises:
            QeRLError: The template cannot be rendered, or leaves out a message, or one is no text.
        """
        for message in prompt:
            if isinstance(message["content"], list):
                text_of(message["content"], "A prompt")
        roles = tuple(message["role"] for message in prompt)
        if roles not in self._folds:
            self._folds[roles] = self._must_fold(roles)
        return fold_system(prompt) if self._folds[roles] else list(prompt)

    def ids(self, prompt: Sequence[Message]) -> list[int]:
        """Token ids of a prompt, the assistant's turn opened.

        Raises:
            QeRLError: As for :meth:`messages`.
        """
        return self._apply(self.messages(prompt), return_dict=True)["input_ids"]

    def turns(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation, and which of them the assistant writes, its end of turn among
        them.

        That is what the template marks with ``{% generation %}``. Where it marks nothing, a turn is what
        stands between the tokens of the prompt before it and those of the conversation that ends with it,
        both of which must stand in the whole conversation unchanged.

        Raises:
            QeRLError: As for :meth:`messages`; or the template marks no token, or rewrites earlier turns.
        """
        messages = self.messages(messages)
        if re.search(r"\{%-?\s*generation\b", self._tokenizer.get_chat_template()):
            marked = self._apply(messages, return_assistant_tokens_mask=True, **_ENDED)
            if not any(marked["assistant_masks"]):
                raise QeRLError(
                    f"The chat template of {self._name} marks no token as the assistant's; mend it."
                )
            return marked["input_ids"], [bool(mark) for mark in marked["assistant_masks"]]
        whole = self.whole(messages)
        written = [False] * len(whole)
        for at in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
            start = self.before(messages[:at], whole)
            end = len(turn := self.whole(messages[: at + 1]))
            if whole[:end] != turn:
                raise self._rewrites(at)
            written[start:end] = [True] * (end - start)
        return whole, written

    def whole(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a whole conversation; errors as for :meth:`messages`."""
        return self._apply(self.messages(messages), **_ENDED)["input_ids"]

    def before(self, prompt: Sequence[Message], whole: list[int]) -> int:
        """Number of tokens of a prompt with which a conversation begins.

        Raises:
            QeRLError: It begins with others.
        """
        ids = self.ids(prompt)
        if whole[: len(ids)] != ids:
            raise self._rewrites(len(prompt))
        return len(ids)

    def _rewrites(self, at: int) -> QeRLError:
        return QeRLError(
            f"The chat template of {self._name} renders what stands before or in message {at + 1} otherwise "
            "once the conversation has gone on, so no token can be said to be the assistant's there; give "
            "each turn as a prompt with a completion, as the model will meet it, or mark the turns in the "
            "template with {% generation %}."
        )

    def check(self, prompt: Sequence[Message]) -> None:
        """Render the messages as they are.

        Raises:
            QeRLError: The template cannot be rendered.
        """
        self._render(list(prompt))

    def dataset(self, rows: Dataset) -> Dataset:
        """The rows with the column ``prompt`` as :meth:`messages` gives it.

        Raises:
            QeRLError: As for :meth:`messages`, for any of the rows.
        """
        before = list(rows["prompt"])
        after = [self.messages(prompt) for prompt in before]
        if after == before:
            return rows
        # Without its last column a data set would have no rows either, so the new one comes first.
        return rows.add_column(_FOLDED, after).remove_columns("prompt").rename_column(_FOLDED, "prompt")

    def _must_fold(self, roles: tuple[str, ...]) -> bool:
        marked = [{"role": role, "content": _MARK.format(i)} for i, role in enumerate(roles)]
        folds = "system" in roles and not self._writes_all(marked)
        lost = self._lost(marked, fold_system(marked) if folds else marked)
        if lost:
            raise QeRLError(
                f"The chat template of {self._name} leaves out message {lost[0] + 1} of a prompt with the "
                f"messages {', '.join(roles)}, so the model would be asked for something else; fix the "
                "template (chat_template.jinja beside the model), or use another model."
            )
        if folds and not any(self._folds.values()) and is_first_process():
            logger.warning(
                "The chat template of %s takes no system message: the instruction is put in front of the "
                "user message that follows it.",
                self._name,
            )
        return folds

    def _writes_all(self, marked: list[Message]) -> bool:
        try:
            return not self._lost(marked, marked)
        except QeRLError:  # why, shows when the folded messages are rendered
            return False

    def _lost(self, marked: list[Message], sent: list[Message]) -> list[int]:
        """Numbers of the marked messages that are missing in the template's text of the sent ones."""
        rendered = self._render(sent)
        return [i for i, message in enumerate(marked) if message["content"] not in rendered]

    def _render(self, messages: list[Message]) -> str:
        return self._apply(messages, tokenize=False)

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, **{"add_generation_prompt": True, **options}, **self._kwargs
            )
        except Exception as error:  # a template is a program of the model's author
            raise QeRLError(
                f"The chat template of {self._name} cannot render a prompt ({type(error).__name__}: "
                f"{first_line(error)}); fix the template (chat_template.jinja beside the model), or use "
                "another model."
            ) from error

    @property
    def _name(self) -> str:
        return self._tokenizer.name_or_path or "the tokenizer"
