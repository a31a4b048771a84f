"""Keys with an owner: who a request is from, and the share of the server's limits that is theirs.

    alice: {key: tml-..., share: 0.5}
    bob: {key: tml-...}

`--keys FILE` names such a file. A client with one of its keys sees and uses the sessions, models and samplers
of its own owner alone; to others they are not there. What is saved can be read by all who have a key, because
people share checkpoints, and is deleted, or set to expire, by its owner. A share bounds an owner's models,
and what is held of their requests, of bodies on their way and of results.
Turns of the model are not shared out.

The server's own key has the whole of everything, and so has work that no request caused.

Whose request runs is a context variable, which the gate sets: every route runs in the task of its request,
and the records are made there. In the worker's thread it is the server's.
"""

import hmac
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from qerl import yaml12
from qerl.errors import QeRLError
from qerl_serve.names import check_name

KEY_START = "tml-"
"""Clients refuse keys that begin otherwise."""
KEY_LENGTH = 20
"""A shorter key may be guessed: whoever has a link to a download, which it signs, can try them all."""
KEY_IS = f"begins with {KEY_START} and has at least {KEY_LENGTH} characters, all printable ASCII, no spaces"
LOCAL = "local"
"""What routes call the server's own, for whom clients have no word."""


@dataclass(frozen=True)
class Owner:
    """Whose a key is.

    Attributes:
        name: As of a checkpoint; the server's own is empty, and no file of keys can give it.
        share: Of the limits, above 0 and up to 1.
    """

    name: str
    share: float = 1.0

    def may(self, owner: str) -> bool:
        """Whether what belongs to an owner of this name is theirs."""
        return self is SERVER or self.name == owner


SERVER = Owner("")
"""Whoever has the server's own key, and what no request caused; it is known by identity."""
_NOW: ContextVar[Owner] = ContextVar("owner", default=SERVER)


def now() -> Owner:
    """Whose request is being answered."""
    return _NOW.get()


def enter(owner: Owner) -> None:
    """Let what follows in this task be an owner's."""
    _NOW.set(owner)


class Keys:
    """All keys of a server.

    Args:
        own: The server's.
        others: Owners by their keys.

    Raises:
        QeRLError: The server's key is empty, which would let everyone in, or is an owner's too.
    """

    def __init__(self, own: str, others: Mapping[str, Owner]) -> None:
        if not own:
            raise QeRLError("The server's key is empty; give it one that begins with tml-.")
        if own in others:
            raise QeRLError(f"The key of {others[own].name} is the server's own; give each a key of its own.")
        self.own = own
        self._owners = [(key.encode(), owner) for key, owner in {own: SERVER, **others}.items()]

    def owner(self, key: bytes) -> Owner | None:
        """Whose a key is, None if it is nobody's; it takes as long for any key."""
        found = [owner for known, owner in self._owners if hmac.compare_digest(key, known)]
        return found[0] if found else None


def may_be_key(key: object) -> TypeGuard[str]:
    """Whether a key can be one of a server, and is sent by clients as it is."""
    return (
        isinstance(key, str)
        and key.startswith(KEY_START)
        and len(key) >= KEY_LENGTH
        and all("!" <= letter <= "~" for letter in key)
    )


def read_keys(file: Path) -> dict[str, Owner]:
    """The owners of a file, by their keys.

    Raises:
        QeRLError: It cannot be read, others can read it, or it is not as above.
    """
    try:
        if file.stat().st_mode & 0o077:
            raise QeRLError(f"{file} can be read by other users of this machine; chmod 600 {file}.")
        read = yaml12.load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        # The text of an error of YAML may quote a key; the line that it names is enough.
        line = re.search(r"line [0-9]+", str(error))
        why = error.strerror if isinstance(error, OSError) else line[0] if line else "no YAML"
        raise QeRLError(
            f"{file} cannot be read ({why}); write an owner a line, as in docs/serve.md."
        ) from None
    if not isinstance(read, dict) or not read:
        raise QeRLError(f"{file} names no owners; write one a line, as in docs/serve.md.")
    owners: dict[str, Owner] = {}
    for number, (name, said) in enumerate(read.items(), start=1):
        where = f"{file}, owner {number}"  # what stands in the place of a name may be a key
        if not _is_name(name) or not isinstance(said, dict) or not said.keys() <= {"key", "share"}:
            raise QeRLError(
                f"{where}: an owner is NAME: {{key: ..., share: ...}}, with a name of letters, digits and "
                f"_ - . that is not {LOCAL} and does not begin with {KEY_START} or a dot."
            )
        where, key, share = f"{file}, {name}", said.get("key"), said.get("share", 1)
        if not may_be_key(key):
            raise QeRLError(f"{where}: a key {KEY_IS}.")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise QeRLError(f"{where}: the share is no number above 0 and at most 1.")
        if key in owners:
            raise QeRLError(f"{where}: {owners[key].name} has the same key; give each one of their own.")
        owners[key] = Owner(name, float(share))
    return owners


def _is_name(name: object) -> TypeGuard[str]:
    try:
        return check_name(name) != LOCAL and not str(name).startswith(KEY_START)
    except QeRLError:
        return False
