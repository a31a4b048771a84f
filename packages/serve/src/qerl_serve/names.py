"""Validation of ids and names that clients send.

The server issues the ids of sessions and models, but a client may compose a model's id from its session's id
and a number, so ids come back as untrusted text. Names of checkpoints are chosen by clients. Both become
folder names, so neither may contain a slash, begin with a dot, or exceed 128 characters.
"""

import re
from typing import Any, Literal

from qerl.errors import QeRLError

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
SCHEME = "tinker://"
IMPORTED = "imported"
"""Stands for the model id in the paths of adapters given at the start. A model's id contains a session's id
and so never equals it."""

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


def check_id(text: Any, what: str) -> str:
    """Return the id if it is valid; ``what`` names the field in the error.

    Raises:
        QeRLError: The id is not 1 to 128 letters, digits, `_`, `-`, `.` and `:`, or begins with `.` or `:`.
    """
    return _checked(_ID, text, what, "letters, digits and _ - . :")


def check_name(text: Any) -> str:
    """Return the name of a checkpoint if it is valid.

    Raises:
        QeRLError: The name is not 1 to 128 letters, digits, `_`, `-` and `.`, or begins with a dot.
    """
    return _checked(_NAME, text, "The name of a checkpoint", "letters, digits and _ - .")


def split_path(path: Any) -> tuple[str, Kind, str]:
    """Return model id, kind and name of tinker://MODEL_ID/KIND/NAME.

    Raises:
        QeRLError: The path does not have this form.
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
            f"{what} is {_shown(text)}; it must be 1 to 128 of {letters}, and not begin with a dot or colon."
        )
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
