"""Files of the package that a command knows by name; a word in .yaml or with a slash is a path instead."""

import difflib
from collections.abc import Mapping
from pathlib import Path

from qerl.errors import QeRLError


def named_file(word: str, known: Mapping[str, Path], what: str) -> Path:
    """The file that a word on the command line means.

    Args:
        word: A name or a path.
        known: Files of the package by name.
        what: What such a file is, such as ``suite``.

    Raises:
        QeRLError: The package has none of this name.
    """
    if word.endswith((".yaml", ".yml")) or "/" in word:
        return Path(word).expanduser()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}."
        raise QeRLError(f"There is no {what} named {word!r}; {hint} A file is given as a path in .yaml.")
    return known[word]
