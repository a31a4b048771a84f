"""Writing files: whole or not at all, and what the disk refuses as one sentence."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl.errors import QeRLError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and put it there; a process that is killed on the way leaves the older.

    Args:
        path: The file; its folder exists.
        content: What it is to hold, text as UTF-8.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content if isinstance(content, bytes) else content.encode())
    partial.replace(path)


@contextmanager
def writing(what: str, advice: str = "choose another --out") -> Iterator[None]:
    """A block in which what the disk refuses becomes one sentence.

    Args:
        what: The beginning of the sentence, which says what cannot be written where.
        advice: What the user can do.

    Raises:
        QeRLError: The disk refused.
    """
    try:
        yield
    except OSError as error:
        raise QeRLError(f"{what}: {error.strerror or error}; {advice}.") from error
