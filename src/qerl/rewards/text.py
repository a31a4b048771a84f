"""The policy's messages as the text that a reward reads."""

import re

Message = dict[str, str]
Completion = str | list[Message]


def completion_text(completion: Completion) -> str:
    """Return the policy's text: a completion that is text already, or the policy's turns, joined by newlines.

    Messages of others (a tool's result, an environment's answer) are left out. If a tokenizer has a template
    for parsing responses, TRL moves the thinking out of the text into a field of its own; here it is put back
    between its tags.
    """
    if isinstance(completion, str):
        return completion
    return "\n".join(_message_text(message) for message in completion if message["role"] == "assistant")


_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code_blocks(text: str) -> list[str]:
    """Return the contents of code blocks between three backticks that name Python or no language."""
    return _BLOCK.findall(text)


def _message_text(message: Message) -> str:
    thinking = message.get("reasoning_content") or message.get("thinking")
    return (f"<think>{thinking}</think>" if thinking else "") + (message.get("content") or "")
