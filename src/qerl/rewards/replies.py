"""A cache of a server's replies on disk, keyed by the request.

Each file has a request and its reply, and is named by a hash of the request. It appears whole under its name
or not at all, so processes may share a folder and be killed at any time. A file that cannot be read counts as
missing and is written anew.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from qerl.atomic import write_whole
from qerl.errors import QeRLError


class Replies:
    """Replies in a folder, which is created if it is missing.

    Raises:
        QeRLError: The folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QeRLError(f"The folder of replies {folder} cannot be made: {error.strerror}.") from error

    def get(self, url: str, body: dict[str, Any]) -> str | None:
        """Return the reply to a request, or None if there is none."""
        try:
            reply = json.loads(self._file(url, body).read_bytes())["reply"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return reply if isinstance(reply, str) else None

    def put(self, url: str, body: dict[str, Any], reply: str) -> None:
        """Store the reply to a request."""
        file = self._file(url, body)
        file.parent.mkdir(exist_ok=True)
        write_whole(file, json.dumps({"url": url, "request": body, "reply": reply}))

    def _file(self, url: str, body: dict[str, Any]) -> Path:
        asked = json.dumps([url, body], sort_keys=True).encode()
        name = hashlib.blake2b(asked, digest_size=16).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}.json"
