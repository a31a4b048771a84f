"""The commit of the running source, to be recorded with its results."""

import os
import subprocess
from functools import cache
from pathlib import Path

UNKNOWN = "unknown"


@cache
def commit() -> str:
    """Return the commit of this source tree in seven digits, with `-dirty` where files of the package, or
    Python files of bench and lab, differ from it.

    The environment variable QERL_COMMIT takes precedence; it serves copies of the tree without git. An
    installed package gives `unknown`.
    """
    if given := os.environ.get("QERL_COMMIT"):
        return given
    try:
        _git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # fails where git tracks a folder around the package only
        found = _git("rev-parse", "--short=7", "HEAD")
        beside = (f":(top,glob){folder}/**/*.py" for folder in ("bench", "lab"))
        changed = _git("status", "--porcelain", "--", ".", *beside)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return f"{found}-dirty" if changed else found


def _git(*words: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(
        ["git", *words], cwd=here, capture_output=True, text=True, check=True
    ).stdout.strip()
