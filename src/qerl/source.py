"""Which source runs, for the record of what it computes."""

import os
import subprocess
from functools import cache
from pathlib import Path

UNKNOWN = "unknown"


@cache
def commit() -> str:
    """The commit of this source tree in seven digits, with `-dirty` where its Python files differ from it.

    A copy of the tree without git takes it from the environment variable QERL_COMMIT; an installed package
    has none and says `unknown`.
    """
    if given := os.environ.get("QERL_COMMIT"):
        return given
    try:
        _git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # git may know a folder around the package only
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
