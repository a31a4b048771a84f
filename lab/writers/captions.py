"""Rows of result files, Markdown tables, and the captions that say where their numbers come from."""

from collections.abc import Iterable, Sequence
from typing import Any

from bench.result import Row, read_rows
from qerl.families.sizes import SIZES


def rows(name: str, /, **where: Any) -> list[Row]:
    """Rows of a file whose fields have the given values."""
    return [row for row in read_rows(name) if all(row.get(k) == v for k, v in where.items())]


def row(name: str, /, **where: Any) -> Row:
    """The one row of a file whose fields have the given values."""
    (only,) = rows(name, **where)
    return only


def side_by_side(name: str, *arms: str) -> list[tuple[Row, ...]]:
    """Runs of arms of `lab.trained` side by side, of each seed that has them all, without the tuning's."""
    found = [{row["seed"]: row for row in rows(name, arm=arm, tuning=False)} for arm in arms]
    return [tuple(each[seed] for each in found) for seed in found[0] if all(seed in each for each in found)]


RECOMPUTES = (
    "Of QeRL's layers the memory plan chose how many are recomputed for backward; TRL recomputes all."
)
"""For captions of tables with both."""


def table(head: Sequence[str], lines: Iterable[Sequence[Any]], caption: str) -> str:
    """A table in Markdown, with its caption as a paragraph below; None is an empty cell."""
    body = ["" if not cells else _line(cells) for cells in lines]
    return "\n".join([_line(head), _line(["-"] * len(head), ""), *body, "", caption]) + "\n"


def _line(cells: Sequence[Any], space: str = " ") -> str:
    return (
        "|" + "|".join(f"{space}{cell}{space}" if cell not in (None, "") else space for cell in cells) + "|"
    )


def source(*names: str) -> str:
    """Cards, dates and commits of results, as a caption's sentence."""
    commits: dict[str, list[str]] = {}
    for found in (found for name in names for found in rows(name)):
        where = f"{card(found)}, {found['date'][:10]}"
        commits.setdefault(where, []).append(found["commit"])
    return "; ".join(f"{where}, {commits_of(found)}" for where, found in commits.items()) + "."


def card(found: Row) -> str:
    """The GPU of a row, without its vendor."""
    return found["gpu"].removeprefix("NVIDIA ")


def commits_of(found: Iterable[str]) -> str:
    """Commits in words, each once."""
    *others, last = dict.fromkeys(found)
    return f"commits {', '.join(others)} and {last}" if others else f"commit {last}"


def files(*names: str) -> str:
    """The files of results, for a caption."""
    return "Files: " + ", ".join(f"{name}.json" for name in names) + "."


def attention(found: Row) -> str:
    """The FlashAttention of a step's long rows; results that do not say it are of torch's."""
    return str(found.get("attention_kernel", "FlashAttention-2")).split(" (")[0]


def recomputed(found: Row) -> str:
    """How many layers a step computed again for backward, of how many; all where its row does not say."""
    every, layers = found.get("every_n_layers") or 1, SIZES[found["shape"]].layers
    return f"{-(-layers // every) if every <= layers else 0} of {layers}"
