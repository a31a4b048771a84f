"""Types and ranges of settings, and error messages of one sentence for wrong values.

A dataclass checks nothing: `temperature: hot` would end a run when its first rollout begins,
`reward_timeout: -1` would train on zeros to the end. Each annotation here is a type that pydantic knows, in
strict mode: true is not a number, 1.5 not an integer, "3" neither, and NaN and infinity are not numbers. The
groups of a run's settings (`qerl.settings.groups`), requests of evaluations and the files of studies use
them.
"""

import functools
import json
import reprlib
from collections.abc import Callable, Mapping
from enum import Enum
from numbers import Real
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from qerl.errors import QeRLError

MOST = 2**31 - 1
"""Largest integer that a field takes; numbers of tokens, steps or samples are far below."""

PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
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

ShareOrSteps = Annotated[float, Field(gt=0, lt=1)] | Steps
"""As transformers counts: below 1 a share of all steps, from 1 on steps."""


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


def _decoded(value: Any) -> Any:
    """Decode a mapping given as JSON text, as TRL's and transformers' command-line parsers pass it."""
    try:
        return json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    except ValueError as error:
        raise ValueError(f"as text it must be valid JSON ({error})") from None


Decoded = BeforeValidator(_decoded)

Options = Annotated[dict[str, Any], Decoded]
"""Options by name."""

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

Checked = TypeVar("Checked", bound=BaseModel)

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
    """Return the value as the field's type holds it (1 as 1.0 for a float, one name as a list of one).

    Args:
        name: Name of the field, for the message.
        value: A member of an enumeration counts as its value, a path as its text, a number or a truth
            value of numpy as Python's, a tuple as a list.
        type_: The field's annotation.

    Raises:
        QeRLError: The value is not of this type, or out of its range.
    """
    try:
        return _adapter(type_).validate_python(_plain(value))
    except ValidationError as error:
        raise QeRLError(_sentence(name, value, error.errors(include_url=False))) from None


def validated(kind: type[Checked], values: Mapping[str, Any]) -> Checked:
    """Build the record with these values.

    Raises:
        QeRLError: A value is wrong; the message names the first in the order of the record's fields.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        name = str(faults[0]["loc"][0])
        own: list[Any] = [fault | {"loc": fault["loc"][1:]} for fault in faults if fault["loc"][0] == name]
        raise QeRLError(_sentence(name, values.get(name), own)) from None


class Group(BaseModel):
    """Fields that belong together, each checked as :func:`checked` checks one; an unknown name is refused.

    The text below a field describes it.

    Attributes:
        rules: Functions of the group that raise `QeRLError` where its fields contradict each other.
    """

    model_config = STRICT | ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )
    rules: ClassVar[tuple[Callable[[Any], None], ...]] = ()

    @field_validator("*", mode="before")
    @classmethod
    def _of_scripts(cls, value: Any) -> Any:
        return _plain(value)

    @model_validator(mode="after")
    def _agrees(self) -> "Group":
        for rule in self.rules:
            rule(self)
        return self

    @classmethod
    def flat(cls) -> dict[str, FieldInfo]:
        """Return the declarations by the names that the fields have in `QeRLConfig`."""
        return {info.alias or name: info for name, info in cls.model_fields.items()}

    @classmethod
    def of(cls, flat: Any) -> Self:
        """Build the group from an object that has its fields by their flat names.

        Raises:
            QeRLError: A field is of another type or out of its range, or fields contradict each other.
        """
        return validated(cls, {name: getattr(flat, name) for name in cls.flat() if hasattr(flat, name)})


def _plain(value: Any) -> Any:
    """Return the plain value of an enumeration, a path, a numpy number or a tuple; others as they are."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Real | np.bool_) and hasattr(value, "item"):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _adapter(type_: Any) -> TypeAdapter:
    return TypeAdapter(type_, config=STRICT)


def _sentence(name: str, value: Any, faults: list[Any]) -> str:
    """Write the error message with all types that the value could have: a union reports one fault each."""
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
