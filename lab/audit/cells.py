"""A generated table of a page, and its published cells beside the recomputed ones."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A generated table of a page.

    Attributes:
        name: Name of its mark.
        head: Column headings.
        rows: Cells of each row.
        text: The whole text, including the caption below the rows.
    """

    name: str
    head: list[str]
    rows: list[list[str]]
    text: str

    @property
    def files(self) -> list[str]:
        """Result files that the caption names."""
        return re.findall(r"([\w.-]+)\.json\.gz", self.text)


@dataclass(frozen=True)
class Cell:
    """A published text of a page, its place, and the text recomputed from the raw files."""

    where: str
    published: str
    found: str


def row_of_cells(row: Sequence[str], found: Sequence[str], head: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells of a row, except its first, with the recomputed texts."""
    for column, cell, own in zip(head[1:], row[1:], found, strict=True):
        yield Cell(f"{row[0]}, {column}", cell, own)
