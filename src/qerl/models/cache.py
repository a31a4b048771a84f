"""The cache of converted and quantised models, each made there once."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from qerl.atomic import new_folder


def cache_folder() -> Path:
    """Folder of converted models: ``$QERL_CACHE``, else ``~/.cache/qerl``."""
    return Path(os.environ.get("QERL_CACHE") or Path.home() / ".cache" / "qerl")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Folder of the cache with what ``make`` wrote into it, made on the first call and found on the next.

    Processes that ask at the same time wait for the one that makes it; the folder appears under its name only
    when it is complete.

    Args:
        name: Of the folder; another content needs another name.
        make: Writes the content into an empty folder.
    """
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with new_folder(folder, locked=True) as partial:
                make(partial)
    return folder
