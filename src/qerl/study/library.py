"""The studies that are part of the package, by name; a word in .yaml or with a slash is a path instead."""

import difflib
from pathlib import Path

from qerl.errors import QeRLError

FOLDER = Path(__file__).parent / "examples"


def packaged() -> dict[str, Path]:
    """Files of the package's studies by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def study_file(word: str) -> Path:
    """The file that a word on the command line means.

    Raises:
        QeRLError: The package has no study of this name.
    """
    if word.endswith((".yaml", ".yml")) or "/" in word:
        return Path(word).expanduser()
    known = packaged()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}."
        raise QeRLError(f"There is no study named {word!r}; {hint} A file is given as a path in .yaml.")
    return known[word]
