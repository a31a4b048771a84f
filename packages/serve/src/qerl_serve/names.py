"""Names from clients, checked in one place before they are used.

Ids of sessions and models are the server's own, but a client may compose those of models from its session's
id and a number, so they come back as text like any other. Names of checkpoints are the client's. Both become
folders, so neither may hold a slash, begin with a dot, or be long.
"""

import re
from typing import Any, Literal

from qerl.errors import QeRLError

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
SCHEME = "tinker://"
IMPORTED = "imported"
"""In the place of a model's id, which has the id of a session in it and so is never this: what a server
began with."""

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


def check_id(text: Any, what: str) -> str:
    """The id, checked; ``what`` names the field in the error.

    Raises:
        QeRLError: It is not made of letters, digits, `_`, `-`, `.` and `:`.
    """
    return _checked(_ID, text, what, "letters, digits and _ - . :")


def check_name(text: Any) -> str:
    """The name of a checkpoint, checked.

    Raises:
        QeRLError: It is not made of letters, digits, `_`, `-` and `.`.
    """
    return _checked(_NAME, text, "The name of a checkpoint", "letters, digits and _ - .")


def split_path(path: Any) -> tuple[str, Kind, str]:
    """Model id, kind and name of tinker://MODEL_ID/KIND/NAME.

    Raises:
        QeRLError: It is not such a path.
    """
    parts = path.removeprefix(SCHEME).split("/") if isinstance(path, str) and path.startswith(SCHEME) else []
    kind = next((kind for kind in KINDS if parts[1:2] == [kind]), None)
    if len(parts) != 3 or kind is None:
        raise QeRLError(
            f"{_shown(path)} is not the path of a checkpoint; such a path is "
            f"{SCHEME}MODEL_ID/KIND/NAME, with the kind {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )
    return check_id(parts[0], "The model id of a path"), kind, check_name(parts[2])


def _checked(pattern: re.Pattern[str], text: Any, what: str, letters: str) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise QeRLError(
            f"{what} is {_shown(text)}; it must be 1 to 128 of {letters}, and not begin with a dot."
        )
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
