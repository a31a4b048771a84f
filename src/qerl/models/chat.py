"""Rendering of prompts by a model's chat template, shared by training, evaluation and single answers.

A task describes its answer format in a system message, and templates treat system messages differently. Most
render them, Gemma's first templates and Mistral's older ones raise an error, and some drop them silently, so
that the model is rewarded for a format that its prompt never mentions. Here the template is tested with a
marker in every message. If the template rejects or omits a system message, it is folded: put before the next
user message, as templates without a system role do themselves. Any other missing message, or a template that
cannot be rendered, is an error before the run starts.

Folding happens in the dataset, because TRL renders the prompts of a training run itself: the template accepts
the folded messages unchanged, so both get the same tokens.

Templates of reasoning models write ``<think>`` at the end of the prompt, so a completion begins within the
thinking. :attr:`Chat.opening` has this text, so that a task can judge the whole turn of the assistant.

Given up: the template is tested once per sequence of roles, so a template that drops a system message because
of its content is not detected.
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

# Parameters of transformers' function itself; a template's own arguments have other names.
_TAKEN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents",
    "kwargs",
}


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each system message's text moved to the start of the next user message."""
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
    """Return a message's content as text, with its parts joined.

    Args:
        content: Text, or a list of parts, as for vision models.
        where: Source of the message, for the error.

    Raises:
        QeRLError: A part is an image or anything else but text.
    """
    texts = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind != "text" or not isinstance(text, str):
            odd = kind if kind not in (None, "text") else reprlib.repr(part)
            raise QeRLError(
                f"{where} has a message with a part that is not text ({odd}); only text is supported, so "
                "leave such prompts out."
            )
        texts.append(text)
    return "".join(texts)


def content_of(message: Mapping[str, Any], where: str) -> str:
    """Return the content of a message as text, as `text_of` does; missing content is an error, too."""
    content = message.get("content")
    if content is None:
        raise QeRLError(
            f"{where} has a message without content (role {message['role']}); give it a text, or leave it "
            "out."
        )
    return text_of(content if isinstance(content, str | list) else [content], where)


def plain_message(message: Mapping[str, Any], where: str) -> Message:
    """Return only role and content of a message, the content as text.

    Args:
        message: Other keys are allowed if their values are empty, as in a dataset where other rows use them.
        where: Source of the message, for the error.

    Raises:
        QeRLError: Another key, such as `tool_calls` or `reasoning_content`, has a value; or as `content_of`.
    """
    others = [
        name
        for name, value in message.items()
        if name not in ("role", "content") and value not in (None, "", [], {})
    ]
    if others:
        raise QeRLError(
            f"{where} has a message with {', '.join(others)} (role {message['role']}), but only role and "
            "content are read; write it into the content, or leave the row out."
        )
    return {"role": message["role"], "content": content_of(message, where)}


class Chat:
    """The chat template of a tokenizer, with fixed arguments for all prompts of a run.

    Args:
        tokenizer: A tokenizer with a chat template.
        template_kwargs: The template's own arguments, such as ``enable_thinking``; TRL's field
            ``chat_template_kwargs``.

    Raises:
        QeRLError: An argument is a parameter of transformers' ``apply_chat_template`` itself.
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
                f"chat_template_kwargs sets {', '.join(taken)}, which apply_chat_template reads itself; "
                "give only arguments of the template, such as enable_thinking."
            )

    @cached_property
    def opening(self) -> str:
        """The part of the assistant's turn that ends a prompt: ``<think>`` if the template opens one, else
        an empty string."""
        mark = _MARK.format(0)
        turn = self._render([{"role": "user", "content": mark}]).rpartition(mark)[2]
        return THINK if turn.rfind(THINK) > turn.rfind("</think>") else ""

    def messages(self, prompt: Sequence[Message]) -> list[Message]:
        """Return the messages as the template accepts them: unchanged, or with system messages folded.

        Raises:
            QeRLError: The template cannot be rendered or omits a message, or a message is not text.
        """
        for message in prompt:
            if isinstance(message["content"], list):
                text_of(message["content"], "A prompt")
        roles = tuple(message["role"] for message in prompt)
        if roles not in self._folds:
            self._folds[roles] = self._must_fold(roles)
        return fold_system(prompt) if self._folds[roles] else list(prompt)

    def ids(self, prompt: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt, including the start of the assistant's turn.

        Raises:
            QeRLError: As for :meth:`messages`.
        """
        return self._apply(self.messages(prompt), return_dict=True)["input_ids"]

    def turns(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation and a mask of the assistant's tokens, end of turn included.

        The mask comes from ``{% generation %}`` in the template. Without it, a turn consists of the tokens
        after the prompt before the turn, up to the end of the conversation that ends with the turn; both must
        be unchanged prefixes of the whole conversation.

        Raises:
            QeRLError: As for :meth:`messages`; or the template marks no token, or rewrites earlier turns.
        """
        messages = self.messages(messages)
        if re.search(r"\{%-?\s*generation\b", self._tokenizer.get_chat_template()):
            marked = self._apply(messages, return_assistant_tokens_mask=True, **_ENDED)
            if not any(marked["assistant_masks"]):
                raise QeRLError(
                    f"The chat template of {self._name} marks no token as the assistant's; fix its {{% "
                    "generation %} blocks."
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
        """Return the token ids of a whole conversation; errors as for :meth:`messages`."""
        return self._apply(self.messages(messages), **_ENDED)["input_ids"]

    def before(self, prompt: Sequence[Message], whole: list[int]) -> int:
        """Return the number of tokens of a prompt that is a prefix of a conversation.

        Raises:
            QeRLError: The prompt's tokens are no prefix of ``whole``.
        """
        ids = self.ids(prompt)
        if whole[: len(ids)] != ids:
            raise self._rewrites(len(prompt))
        return len(ids)

    def _rewrites(self, at: int) -> QeRLError:
        return QeRLError(
            f"The chat template of {self._name} changes the tokens up to message {at + 1} when the "
            "conversation continues, so the assistant's tokens cannot be identified; give each turn as a "
            "prompt with a completion, or mark the turns in the template with {% generation %}."
        )

    def check(self, prompt: Sequence[Message]) -> None:
        """Raise if the template cannot render the messages as they are.

        Raises:
            QeRLError: The template cannot be rendered.
        """
        self._render(list(prompt))

    def dataset(self, rows: Dataset) -> Dataset:
        """Return the rows with the column ``prompt`` passed through :meth:`messages`.

        Raises:
            QeRLError: As for :meth:`messages`, for any of the rows.
        """
        before = list(rows["prompt"])
        after = [self.messages(prompt) for prompt in before]
        if after == before:
            return rows
        # The new column is added first: a dataset that loses its last column also loses its rows.
        return rows.add_column(_FOLDED, after).remove_columns("prompt").rename_column(_FOLDED, "prompt")

    def _must_fold(self, roles: tuple[str, ...]) -> bool:
        marked = [{"role": role, "content": _MARK.format(i)} for i, role in enumerate(roles)]
        folds = "system" in roles and not self._writes_all(marked)
        lost = self._lost(marked, fold_system(marked) if folds else marked)
        if lost:
            raise QeRLError(
                f"The chat template of {self._name} leaves out message {lost[0] + 1} of a prompt with the "
                f"roles {', '.join(roles)}, so the model would not see it; fix the template "
                "(chat_template.jinja beside the model), or use another model."
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
        except QeRLError:  # the cause is reported when the folded messages are rendered
            return False

    def _lost(self, marked: list[Message], sent: list[Message]) -> list[int]:
        """Return indices of the marked messages that are missing when the template renders ``sent``."""
        rendered = self._render(sent)
        return [i for i, message in enumerate(marked) if message["content"] not in rendered]

    def _render(self, messages: list[Message]) -> str:
        return self._apply(messages, tokenize=False)

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, **{"add_generation_prompt": True, **options}, **self._kwargs
            )
        except Exception as error:  # a template is code, which may raise anything
            raise QeRLError(
                f"The chat template of {self._name} cannot render a prompt ({type(error).__name__}: "
                f"{first_line(error)}); fix the template (chat_template.jinja beside the model), or use "
                "another model."
            ) from error

    @property
    def _name(self) -> str:
        return self._tokenizer.name_or_path or "the tokenizer"
