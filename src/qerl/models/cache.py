"""Where converted and quantised models are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Folder of converted models: ``$QERL_CACHE``, else ``~/.cache/qerl``."""
    return Path(os.environ.get("QERL_CACHE") or Path.home() / ".cache" / "qerl")
