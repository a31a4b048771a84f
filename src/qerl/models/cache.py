"""Where converted and quantised models are kept, and how each is made there once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_folder() -> Path:
    """Folder of converted models: ``$QERL_CACHE``, else ``~/.cache/qerl``."""
    return Path(os.environ.get("QERL_CACHE") or Path.home() / ".cache" / "qerl")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Folder of the cache with what ``make`` wrote into it.

    It is made on the first call and found on the next. Processes that ask at the same time wait for the one
    that makes it; the folder appears under its name only when it is complete.

    Args:
        name: Of the folder; another content needs another name.
        make: Writes the content into the folder that it is given, which does not exist yet.
    """
    folder = cache_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder
