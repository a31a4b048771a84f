"""Compare the pages' figures of runs with the same figures recomputed from the raw files, cell by cell.

A generated table is between ``<!-- table NAME -->`` and ``<!-- /table -->``, a number of a sentence between
``<!-- number NAME -->`` and ``<!-- / -->``. Every mark is recomputed or in `others`, with the reason.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from lab.audit.cells import Cell, Table
from lab.audit.others import NOT_OF_RUNS
from lab.audit.raw import there
from lab.audit.sentences import number
from lab.audit.tables import TABLES

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))

_TABLE = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- /table -->", re.DOTALL)
_MISSING = re.compile(r"No results yet: bench/results has no (\S+)\.json\.gz\.")
_NUMBER = re.compile(r"<!-- number (\S+) -->(.*?)<!-- / -->", re.DOTALL)


def cells(page: str) -> Iterator[Cell | str]:
    """Yield each recomputed cell and number of a page, and the name of each mark that is not recomputed."""
    for name, text in _TABLE.findall(page):
        suffixes = [end for end in TABLES if name.endswith(end)]
        if not suffixes:
            yield name
            continue
        if missing := _MISSING.fullmatch(text.strip()):
            yield Cell(f"{name}: {missing[1]} has run", "no", "yes" if there(missing[1]) else "no")
            continue
        lines = [line for line in text.splitlines() if line.startswith("|")]
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines] or [[], []]
        for cell in TABLES[max(suffixes, key=len)](Table(name, head, rows, text)):
            yield Cell(f"{name}: {cell.where}", cell.published, cell.found)
    for name, published in _NUMBER.findall(page):
        found = number(name)
        yield name if found is None else Cell(name, " ".join(published.split()), found)


def main(arguments: list[str]) -> int:
    """Run `python -m lab audit` with these arguments; return the exit status, 1 if a page differs or the list
    of marks that are not of runs is wrong."""
    parser = argparse.ArgumentParser(prog="python -m lab audit", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    differ, left = 0, set()
    for path in PAGES:
        found = list(cells((ROOT / path).read_text()))
        same = [cell for cell in found if isinstance(cell, Cell)]
        left |= {name for name in found if isinstance(name, str)}
        for cell in same:
            if cell.published != cell.found:
                differ += 1
                print(f"{path}: {cell.where}: published {cell.published!r}, recomputed {cell.found!r}")
        if same:
            print(f"{path}: {len(same)} recomputed.")
    for reason, names in NOT_OF_RUNS.items():
        print(f"Not recomputed, {reason}: {', '.join(names)}.")
    listed = {name for names in NOT_OF_RUNS.values() for name in names}
    for name in sorted(left - listed):
        print(f"{name} is neither recomputed nor in lab/audit/others.py; do one of the two.")
    for name in sorted(listed - left):
        print(f"{name} is recomputed or on no page; take it out of lab/audit/others.py.")
    print(f"{differ} differ.")
    return int(differ > 0 or left != listed)
