"""A generated table of a page, and what of it is compared."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A generated table of a page.

    Attributes:
        name: Of its mark.
        head: Its columns.
        rows: Cells of each row.
        text: All of it, the caption below the rows too.
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
    """What a page says somewhere, and what the raw files say."""

    where: str
    published: str
    found: str


def row_of_cells(row: Sequence[str], found: Sequence[str], head: Sequence[str]) -> Iterator[Cell]:
    """A row's cells behind its first beside what was found."""
    for column, cell, own in zip(head[1:], row[1:], found, strict=True):
        yield Cell(f"{row[0]}, {column}", cell, own)
