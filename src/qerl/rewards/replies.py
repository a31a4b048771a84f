"""Replies of a server on disk, by what was asked.

One file for each, named by a hash of the request, and holding both. It appears whole under its name or not at
all, so processes may share a folder and be killed at any time. A file that cannot be read counts as none and
is written anew.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from qerl.atomic import write_whole
from qerl.errors import QeRLError


class Replies:
    """Replies in a folder, which is made if it is missing.

    Raises:
        QeRLError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QeRLError(f"The folder of replies {folder} cannot be made: {error.strerror}.") from error

    def get(self, url: str, body: dict[str, Any]) -> str | None:
        """The reply to a request, None if there is none."""
        try:
            reply = json.loads(self._file(url, body).read_bytes())["reply"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return reply if isinstance(reply, str) else None

    def put(self, url: str, body: dict[str, Any], reply: str) -> None:
        """Keep a reply."""
        file = self._file(url, body)
        file.parent.mkdir(exist_ok=True)
        write_whole(file, json.dumps({"url": url, "request": body, "reply": reply}))

    def _file(self, url: str, body: dict[str, Any]) -> Path:
        asked = json.dumps([url, body], sort_keys=True).encode()
        name = hashlib.blake2b(asked, digest_size=16).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}.json"
