"""The error a user can act on, and how the causes of errors are quoted."""

import difflib
from collections.abc import Iterable


class QeRLError(Exception):
    """One sentence for the user: what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with status 2. Any other exception is a defect
    and keeps its traceback.
    """


def first_line(error: BaseException) -> str:
    """Return the line of another library's message to quote in an error, without its full stop.

    That is the first line, or torch's line about a size mismatch below a heading.
    """
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "size mismatch" in line), lines[0] if lines else repr(error))


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known names nearest to an unknown one, `` (did you mean 'a'?)``; empty if none is near.

    Args:
        name: The unknown name.
        known: The known names.
        cutoff: Smallest similarity, from 0 to 1, as `difflib` measures it.
    """
    near = difflib.get_close_matches(name, [*known], n=2, cutoff=cutoff)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
