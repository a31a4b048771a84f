"""Compare what the pages say of studies with what the raw files say, cell by cell.

A generated table stands between ``<!-- table NAME -->`` and ``<!-- /table -->``, a number of a sentence
between ``<!-- number NAME -->`` and ``<!-- / -->``. Those of these pages that are not recomputed are named.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from lab.audit.cells import Cell, Table
from lab.audit.sentences import number
from lab.audit.tables import TABLES

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/method.md", "docs/noise-results.md", "docs/training.md")

_TABLE = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- /table -->", re.DOTALL)
_NUMBER = re.compile(r"<!-- number (\S+) -->(.*?)<!-- / -->", re.DOTALL)


def cells(page: str) -> Iterator[Cell | str]:
    """Each cell and number of a page that is recomputed, and the name of each mark that is not."""
    for name, text in _TABLE.findall(page):
        compute = next((make for end, make in TABLES.items() if name.endswith(end)), None)
        if compute is None:
            yield name
            continue
        lines = [line for line in text.splitlines() if line.startswith("|")]
        head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines] or [[], []]
        for cell in compute(Table(name, head, rows, text)):
            yield Cell(f"{name}: {cell.where}", cell.published, cell.found)
    for name, published in _NUMBER.findall(page):
        found = number(name)
        yield name if found is None else Cell(name, " ".join(published.split()), found)


def main(arguments: list[str]) -> int:
    """Runs `python -m lab audit` with these arguments; returns the exit status, 1 where a page differs."""
    parser = argparse.ArgumentParser(prog="python -m lab audit", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    differ = 0
    for path in PAGES:
        found = list(cells((ROOT / path).read_text()))
        same = [cell for cell in found if isinstance(cell, Cell)]
        for cell in same:
            if cell.published != cell.found:
                differ += 1
                print(f"{path}: {cell.where}: published {cell.published!r}, recomputed {cell.found!r}")
        others = ", ".join(name for name in found if isinstance(name, str))
        print(f"{path}: {len(same)} recomputed. Not recomputed: {others or 'nothing'}.")
    print(f"{differ} differ.")
    return int(differ > 0)
