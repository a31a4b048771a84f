"""The cache folder of converted and quantised models, each created once."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from qerl.atomic import new_folder


def cache_folder() -> Path:
    """Return the folder of converted models: ``$QERL_CACHE``, else ``~/.cache/qerl``."""
    return Path(os.environ.get("QERL_CACHE") or Path.home() / ".cache" / "qerl")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, filled by ``make`` on the first call and reused afterwards.

    Concurrent processes wait for the one that fills it; the folder appears under its name only when complete.

    Args:
        name: Name of the folder; different content needs a different name.
        make: Writes the content into an empty folder.
    """
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with new_folder(folder, locked=True) as partial:
                make(partial)
    return folder
