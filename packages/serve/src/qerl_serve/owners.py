"""API keys with owners: the owner of a request, and the owner's share of the server's limits.

    alice: {key: tml-..., share: 0.5}
    bob: {key: tml-...}

`--keys FILE` names such a file. A client with one of its keys sees and uses only the sessions, models and
samplers of the key's owner; those of others do not exist for it. Saved weights can be read with any key,
because people share checkpoints, but are deleted, or set to expire, only by their owner. A share bounds an
owner's models, incoming bodies, waiting requests and results. Time on the model is not divided by shares.

The server's own key may use everything and is bound by no share; the same holds for work that no request
caused.

The current owner is a context variable, set by the gate: every route runs in the asyncio task of its request,
and creates its records there. In the worker's thread the owner is `SERVER`.
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
"""Prefix that clients require of a key."""
KEY_LENGTH = 20
"""Minimum length. The key signs download links, so a shorter one could be found from a link by trying all
keys."""
KEY_IS = f"begins with {KEY_START} and has at least {KEY_LENGTH} characters, all printable ASCII, no spaces"
LOCAL = "local"
"""Owner in answers for models of the server's own key, whose owner's name is empty."""


@dataclass(frozen=True)
class Owner:
    """The owner of a key.

    Attributes:
        name: Made like a checkpoint's name; empty for the server's own, which no file of keys can give.
        share: Fraction of the limits, above 0 and at most 1.
    """

    name: str
    share: float = 1.0

    def may(self, owner: str) -> bool:
        """Return True if this owner may use what belongs to the owner of this name."""
        return self is SERVER or self.name == owner


SERVER = Owner("")
"""Owner of the server's own key and of work that no request caused; compared by identity."""
_NOW: ContextVar[Owner] = ContextVar("owner", default=SERVER)


def now() -> Owner:
    """Return the owner of the request being answered."""
    return _NOW.get()


def enter(owner: Owner) -> None:
    """Set the owner for the rest of this asyncio task."""
    _NOW.set(owner)


class Keys:
    """All keys of a server.

    Args:
        own: The server's own key.
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
        """Return the owner of a key, None if it is unknown; every key takes equally long."""
        found = [owner for known, owner in self._owners if hmac.compare_digest(key, known)]
        return found[0] if found else None


def may_be_key(key: object) -> TypeGuard[str]:
    """Return True if a value is valid as a server's key, which clients send unchanged."""
    return (
        isinstance(key, str)
        and key.startswith(KEY_START)
        and len(key) >= KEY_LENGTH
        and all("!" <= letter <= "~" for letter in key)
    )


def read_keys(file: Path) -> dict[str, Owner]:
    """Return the owners in a file of keys, by key.

    Raises:
        QeRLError: The file cannot be read, other users can read it, or it is not in the format above.
    """
    try:
        if file.stat().st_mode & 0o077:
            raise QeRLError(f"{file} can be read by other users of this machine; chmod 600 {file}.")
        read = yaml12.load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        # The text of a YAML error may quote a key; its line number is enough.
        line = re.search(r"line [0-9]+", str(error))
        why = error.strerror if isinstance(error, OSError) else line[0] if line else "no YAML"
        raise QeRLError(
            f"{file} cannot be read ({why}); write an owner a line, as in docs/serve.md."
        ) from None
    if not isinstance(read, dict) or not read:
        raise QeRLError(f"{file} names no owners; write one a line, as in docs/serve.md.")
    owners: dict[str, Owner] = {}
    for number, (name, said) in enumerate(read.items(), start=1):
        where = f"{file}, owner {number}"  # the text in the place of a name may be a key
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
