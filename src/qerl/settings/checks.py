"""Type and range of every field of the settings, checked by pydantic from the fields' own annotations.

A dataclass checks nothing: `temperature: hot` would end a run when its first rollout begins,
`reward_timeout: -1` would train on zeros to the end. Each annotation is a type that pydantic knows, in
strict mode: true is no number, 1.5 no integer, "3" neither, and NaN and infinity are no numbers either.
Ranges are part of the annotation. What a field accepts stands in one place, at the field; the parents'
fields, whose annotations say less than what is accepted, are in `qerl.settings.parents`.
"""

import functools
import reprlib
from enum import Enum
from numbers import Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
)

from qerl.errors import QeRLError

MOST = 2**31 - 1
"""Largest integer that a field takes; what counts tokens, steps or samples is far below."""

PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Drafted = Annotated[int, Field(ge=0, le=15)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


def _whole_as_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value >= 1 and value.is_integer() else value


Steps = Annotated[PositiveInt, BeforeValidator(_whole_as_int)]
"""A number of steps; transformers' fields that may also be a share are floats, so 100.0 is one."""

ShareOrSteps = Annotated[
    float, GetPydanticSchema(lambda _, schema_of: schema_of(Annotated[float, Field(gt=0, lt=1)] | Steps))
]
"""As transformers counts: below 1 a share of all steps, from 1 on steps. Called a float, since transformers'
parser of the command line takes no union."""


def _some_characters(text: str) -> str:
    if not text:
        raise ValueError("it must not be empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it holds bytes that are not UTF-8")
    return text


def _no_control_characters(text: str) -> str:
    if any(ord(character) < 32 for character in text):
        raise ValueError("it holds a control character")
    return text


Passage = Annotated[str, AfterValidator(_some_characters)]
"""A text of one or several lines."""

Text = Annotated[Passage, AfterValidator(_no_control_characters)]
"""A name or a path."""

_One = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)

Names = Annotated[list[Text], _One]
"""A list of names; a single name is a list of one."""

Passages = Annotated[list[Passage], _One]
"""A list of texts; a single one is a list of one."""

if TYPE_CHECKING:
    Options = dict[str, Any]
else:  # transformers' parser of the command line reads it as text, which `qerl.settings.parsed` decodes
    Options = Annotated[
        dict[str, Any] | str | None, GetPydanticSchema(lambda _, schema_of: schema_of(dict[str, Any]))
    ]

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

_WORDS = {
    "Input should be": "it must be",
    "Value error, ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    "a valid dictionary": "a mapping",
    "Extra inputs are not permitted": "there is no such option",
    "Value should have at least 1 item after validation, not 0": "it must not be empty",
    "List should have at least 1 item after validation, not 0": "it must not be empty",
    "Unable to parse input string as an integer, exceeded maximum size": "it must be smaller",
}


def checked(name: str, value: Any, type_: Any) -> Any:
    """The value, as the field's type holds it (1 as 1.0 for a float, one name as a list of one).

    Args:
        name: Of the field, for the message.
        value: A member of an enumeration counts as its value, a path as its text, a number or a truth
            value of numpy as Python's, a tuple as a list.
        type_: The field's annotation.

    Raises:
        QeRLError: The value is not of this type, or out of its range.
    """
    try:
        return _adapter(type_).validate_python(_plain(value))
    except ValidationError as error:
        raise QeRLError(_sentence(name, value, error)) from None


def _plain(value: Any) -> Any:
    """What a script hands over in place of a plain value, as that value."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Real | np.bool_) and hasattr(value, "item"):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _adapter(type_: Any) -> TypeAdapter:
    return TypeAdapter(type_, config=_STRICT)


def _sentence(name: str, value: Any, error: ValidationError) -> str:
    """All that the value could have been: a union has one complaint for each of its types."""
    faults = error.errors(include_url=False)
    inside = [p for p in faults[0]["loc"] if isinstance(p, int) or (isinstance(value, dict) and p in value)]
    if inside:  # of a list or mapping, the first wrong item says enough
        name, faults = f"{name}[{inside[0]}]", faults[:1]
    first, *others = dict.fromkeys(_in_words(fault["msg"]) for fault in faults)
    text = " or ".join([first, *(words.removeprefix("it must be ") for words in others)])
    return f"{name} is {reprlib.repr(faults[0]['input'])}; {text}."


def _in_words(message: str) -> str:
    for words, ours in _WORDS.items():
        message = message.replace(words, ours)
    return message
