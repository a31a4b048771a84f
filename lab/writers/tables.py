"""The numbers of README and docs, written from the results.

A page holds a generated table between ``<!-- table NAME -->`` and ``<!-- /table -->``, and a generated number
within a sentence between ``<!-- number NAME -->`` and ``<!-- / -->``; rendered pages do not show the marks.
The text between them is made by the function of that name in ``TABLES`` or ``NUMBERS`` from the JSON files in
bench/results (:mod:`lab.writers.figures`)::

    python -m lab tables            # rewrite README.md and docs
    python -m lab tables --check    # name the pages that differ from the results

So each such number in a page comes from a result file, and a table that was edited by hand fails a test. The
same command writes the files of the package that are made entirely from results (``FILES``).
"""

import argparse
import re
from pathlib import Path

from lab.writers.figures import NUMBERS, TABLES
from lab.writers.step_times import step_times

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

FILES = {ROOT / "src" / "qerl" / "plan" / "steps.json": step_times}

_TABLE = re.compile(r"(<!-- table (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
_NUMBER = re.compile(r"(<!-- number (\S+) -->)(.*?)(<!-- / -->)", re.DOTALL)


def render(page: str) -> str:
    """Return the page with its tables and numbers regenerated.

    Raises:
        KeyError: A mark names a table or number that does not exist.
    """
    page = _TABLE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[4]}", page)
    return _NUMBER.sub(lambda m: f"{m[1]}{NUMBERS[m[2]]()}{m[4]}", page)


def outdated() -> dict[Path, str]:
    """Return the pages and files that differ from the results, with their correct text."""
    wanted = {page: render(page.read_text()) for page in PAGES} | {
        path: make() for path, make in FILES.items()
    }
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def main(arguments: list[str]) -> int:
    """Rewrite the pages, or with --check only name those that differ; return the exit status.

    Raises:
        QeRLError: A result cannot stand in a table.
    """
    parser = argparse.ArgumentParser(prog="python -m lab tables", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 if a page differs"
    )
    check = parser.parse_args(arguments).check
    found = outdated()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)} {'differs' if check else 'written'}")
        if not check:
            path.write_text(text)
    return int(check and bool(found))
