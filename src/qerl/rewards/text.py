"""The policy's messages as the text that a reward reads."""

import re

Message = dict[str, str]
Completion = str | list[Message]


def completion_text(completion: Completion) -> str:
    """The policy's text: a completion that is text already, or its turns, one below the other.

    Messages of others (a tool's result, an environment's answer) are left out. Where a tokenizer brings a
    template for parsing responses, TRL moves the thinking out of the text into a field of its own; here it
    stands between its tags again.
    """
    if isinstance(completion, str):
        return completion
    return "\n".join(_message_text(message) for message in completion if message["role"] == "assistant")


_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code_blocks(text: str) -> list[str]:
    """The blocks of Python that stand between three backticks, without a language or with Python's name."""
    return _BLOCK.findall(text)


def _message_text(message: Message) -> str:
    thinking = message.get("reasoning_content") or message.get("thinking")
    return (f"<think>{thinking}</think>" if thinking else "") + (message.get("content") or "")
