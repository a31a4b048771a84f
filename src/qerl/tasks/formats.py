r"""Answer formats: the instruction in the prompt and its check by the format reward, in one place.

The two belong together: a reward that expects tags which the prompt never mentions pays for luck, and a model
that is evaluated with another prompt than it was trained with is measured on something else.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from qerl.errors import QeRLError
from qerl.rewards.text import code_blocks
from qerl.tasks import answers


@dataclass(frozen=True)
class AnswerFormat:
    """One way to state an answer.

    Attributes:
        name: The name by which a task's options know the format.
        instruction: The system prompt that asks for the format; empty for none.
        extract: Gives the final answer of a completion, or None if it states none.
        followed: True for a completion of exactly this form.
        write: Formats a reasoning and an answer as a completion of this form, for worked examples.
    """

    name: str
    instruction: str
    extract: Callable[[str], str | None]
    followed: Callable[[str], bool]
    write: Callable[[str, str], str] = "{}\n{}".format


_TAGS = re.compile(r"\s*<think>(.+?)</think>\s*<answer>(.+?)</answer>\s*", re.DOTALL)


def _tags_followed(text: str) -> bool:
    marks = ("<think>", "</think>", "<answer>", "</answer>")
    return _TAGS.fullmatch(text) is not None and all(text.count(mark) == 1 for mark in marks)


def _hashes_followed(text: str) -> bool:
    lines = text.strip().split("\n")
    return (
        text.count("####") == 1
        and lines[-1].startswith("####")
        and answers.after_hashes(lines[-1]) is not None
    )


def _boxed_followed(text: str) -> bool:
    return len(re.findall(r"\\f?boxed\b", text)) == 1 and answers.boxed(text) is not None


FORMATS = {
    fmt.name: fmt
    for fmt in (
        AnswerFormat(
            "tags",
            "Think about the problem first, then answer. Put your reasoning between <think> and </think> and "
            "the final answer alone between <answer> and </answer>, like this: "
            "<think> reasoning </think> <answer> final answer </answer>",
            answers.final_answer,
            _tags_followed,
            "<think> {} </think> <answer> {} </answer>".format,
        ),
        AnswerFormat(
            "boxed",
            r"Please reason step by step, and put your final answer within \boxed{}.",
            answers.final_answer,
            _boxed_followed,
            "{}\n\\boxed{{{}}}".format,
        ),
        AnswerFormat(
            "hashes",
            "Solve the problem step by step. End with a line that holds #### and the answer.",
            answers.final_answer,
            _hashes_followed,
            "{}\n#### {}".format,
        ),
        AnswerFormat(
            "number",
            "Solve the problem step by step and end with the answer as a number.",
            lambda text: answers.final_answer(text) or answers.last_number(text),
            lambda text: answers.last_number(text) is not None,
        ),
        AnswerFormat(
            "code",
            "Answer with one complete Python program in a block from ```python to ```.",
            lambda text: next((block.rstrip() for block in reversed(code_blocks(text))), None),
            lambda text: len(code_blocks(text)) == 1 and text.count("```") == 2,
            "{}\n```python\n{}\n```".format,
        ),
    )
}


def get_format(name: str) -> AnswerFormat:
    """The format of that name.

    Raises:
        QeRLError: No format has the name.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise QeRLError(f"Answer format {name!r} is unknown; use one of: {', '.join(FORMATS)}.")
    return FORMATS[name]
