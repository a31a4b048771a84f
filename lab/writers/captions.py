"""Rows of result files, Markdown tables, and captions that name the sources of their numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

from bench.result import Row, read_rows
from qerl.families.sizes import SIZES


def rows(name: str, /, **where: Any) -> list[Row]:
    """Return the rows of a file whose fields have the given values."""
    return [row for row in read_rows(name) if all(row.get(k) == v for k, v in where.items())]


def row(name: str, /, **where: Any) -> Row:
    """Return the only row of a file whose fields have the given values."""
    (only,) = rows(name, **where)
    return only


def side_by_side(name: str, *arms: str) -> list[tuple[Row, ...]]:
    """Return tuples of the runs of arms of `lab.trained`, per seed that has all of them; no tuning runs."""
    found = [{row["seed"]: row for row in rows(name, arm=arm, tuning=False)} for arm in arms]
    return [tuple(each[seed] for each in found) for seed in found[0] if all(seed in each for each in found)]


RECOMPUTES = (
    "Of QeRL's layers the memory plan chose how many are recomputed for backward; TRL recomputes all."
)
"""Sentence for captions of tables with both QeRL and TRL."""


def table(head: Sequence[str], lines: Iterable[Sequence[Any]], caption: str) -> str:
    """Return a Markdown table with its caption as a paragraph below; a None cell is left empty."""
    body = ["" if not cells else _line(cells) for cells in lines]
    return "\n".join([_line(head), _line(["-"] * len(head), ""), *body, "", caption]) + "\n"


def _line(cells: Sequence[Any], space: str = " ") -> str:
    return (
        "|" + "|".join(f"{space}{cell}{space}" if cell not in (None, "") else space for cell in cells) + "|"
    )


def source(*names: str) -> str:
    """Return the cards, dates and commits of results, as a caption's sentence."""
    commits: dict[str, list[str]] = {}
    for found in (found for name in names for found in rows(name)):
        where = f"{card(found)}, {found['date'][:10]}"
        commits.setdefault(where, []).append(found["commit"])
    return "; ".join(f"{where}, {commits_of(found)}" for where, found in commits.items()) + "."


def card(found: Row) -> str:
    """Return the GPU of a row, without its vendor."""
    return found["gpu"].removeprefix("NVIDIA ")


def commits_of(found: Iterable[str]) -> str:
    """Return commits in words, each once."""
    *others, last = dict.fromkeys(found)
    return f"commits {', '.join(others)} and {last}" if others else f"commit {last}"


def files(*names: str) -> str:
    """Return the files of results, as a caption's sentence."""
    return "Files: " + ", ".join(f"{name}.json" for name in names) + "."


def attention(found: Row) -> str:
    """Return the FlashAttention of a step's long rows; rows without the field used torch's."""
    return str(found.get("attention_kernel", "FlashAttention-2")).split(" (")[0]


def recomputed(found: Row) -> str:
    """Return "N of M" layers that a step recomputed for backward; all if the row does not say."""
    every, layers = found.get("every_n_layers") or 1, SIZES[found["shape"]].layers
    return f"{-(-layers // every) if every <= layers else 0} of {layers}"
