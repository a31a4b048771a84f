"""Files that are there as a whole or not at all, whenever the process that writes them is killed."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and put it there; an older one is replaced.

    Args:
        path: The file; its folder exists.
        content: What it is to hold, text as UTF-8.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content if isinstance(content, bytes) else content.encode())
    partial.replace(path)
