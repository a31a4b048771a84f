"""Distillation of SmolLM2: cells and numbers of docs/training.md, recomputed from the runs.

Legend: a run is a row of the file; N seeds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lab.audit import statistics as st
from lab.audit.cells import Cell, Table, row_of_cells
from lab.audit.raw import read
from lab.audit.words import estimate, p_value

FILE = "distilled-smollm2.json"
NEAR = 0.01
"""Distance below a teacher's final accuracy within which its pupil counts as having reached it."""

LAST = 5
"""Final steps whose divergences are averaged."""

Row = dict[str, Any]


def runs(*arms: str, file: str = FILE) -> list[tuple[Row, ...]]:
    """Return tuples of the runs of several arms, per seed that has all of them."""
    found: list[dict[int, Row]] = [{} for _ in arms]
    for row in read(file)["rows"]:
        if row["arm"] in arms and not row["tuning"]:
            found[arms.index(row["arm"])][row["seed"]] = row
    return [tuple(of[seed] for of in found) for seed in sorted(set.intersection(*map(set, found)))]


def ends(runs: Sequence[Row]) -> st.Array:
    """Return the accuracies after the last step, [N]."""
    return np.array([run["accuracy"][-1] for run in runs])


def minus_teacher(rl: str, taught: str) -> str:
    """Format the pupils' final accuracies minus those of their teachers."""
    teachers, pupils = zip(*runs(rl, taught), strict=True)
    return estimate(ends(pupils) - ends(teachers))


def pupils(rl: str, taught: str) -> Callable[[Table], Iterator[Cell]]:
    """Return a function that yields the cells of the table of a pupil and its teacher, and of its caption."""

    def compute(table: Table) -> Iterator[Cell]:
        if not (pairs := runs(rl, taught)):
            return
        sides = list(zip(*pairs, strict=True))
        bars = ends(sides[0]) - NEAR
        first = []
        for row, side in zip(table.rows, sides, strict=True):
            steps = [_first(run, bar) for run, bar in zip(side, bars, strict=True)]
            had = sum(step <= run["steps"][-1] for run, step in zip(side, steps, strict=True))
            first.append(np.array(steps))
            found = (
                f"{np.mean([run['accuracy'][0] for run in side]):.3f}",
                plain(ends(side)),
                f"{np.mean(steps):.1f} ({min(steps)} to {max(steps)})",
                f"{had} of {len(side)}",
            )
            yield from row_of_cells(row, found, table.head)
        for what, found_here in (
            ("minus its teacher at its end: ", minus_teacher(rl, taught)),
            ("first step, taught over RL: ", plain(first[1] / first[0], 2)),
        ):
            yield Cell(what, _said(table.text, what), found_here)

    return compute


def _said(text: str, what: str) -> str:
    """Return the part of a caption from the end of ``what`` to the next semicolon."""
    return text.partition(what)[2].partition(";")[0]


def _first(run: Row, bar: float) -> int:
    """Return the first scored step, after 0, with at least this accuracy; else one interval past the last."""
    steps: list[int] = run["steps"]
    enough = [step for step, right in zip(steps, run["accuracy"], strict=True) if step and right >= bar]
    return enough[0] if enough else steps[-1] + (steps[-1] - steps[-2])


def plain(values: st.Array, digits: int = 3) -> str:
    """Format a mean with its BCa interval."""
    low, high = st.bca(values)
    return f"{values.mean():.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def share(arm: str) -> str:
    """Format the share of the gap to 16 bits that an arm has closed, in percent."""
    taught, sixteen = zip(*runs(arm, f"{arm.partition('-')[0]}-16bit"), strict=True)
    before = np.array([run["accuracy"][0] for run in taught])
    whole = ends(sixteen) - before
    if whole.mean() <= 0:
        return "no gap"
    part = ends(taught) - before
    low, high = st.bca_ratio(part, whole)
    return f"{100 * part.mean() / whole.mean():.0f} % ({100 * low:.0f} to {100 * high:.0f})"


WORDS = {
    "reverse KL": "reverse", "forward KL": "forward", "rounded to nearest, reverse KL": "rtn-reverse",
}  # fmt: skip
"""Suffix of an arm's name by the words of the table."""


def bits(table: Table) -> Iterator[Cell]:
    """Yield the cells of the table of distillation from 16 bits."""
    for row in table.rows:
        task, _, words = row[0].partition(", ")
        arm = f"{task}-{WORDS[words]}"
        taught, sixteen = zip(*runs(arm, f"{task}-16bit"), strict=True)
        apart = [run["divergence"] for run in taught]
        found = (
            f"{ends(sixteen).mean():.3f}", f"{np.mean([run['accuracy'][0] for run in taught]):.3f}",
            f"{ends(taught).mean():.3f}", share(arm), f"{np.mean([d[0] for d in apart]):.3f}",
            f"{np.mean([d[-LAST:] for d in apart]):.3f}", str(len(taught)),
        )  # fmt: skip
        yield from row_of_cells(row, found, table.head)


def before_rl(table: Table) -> Iterator[Cell]:
    """Yield the cells of the table of RL after a distillation."""
    pairs = {
        row[0]: list(zip(*runs(f"{row[0]}-rl", f"{row[0]}-reverse-rl"), strict=True)) for row in table.rows
    }
    more = {task: ends(after) - ends(alone) for task, (alone, after) in pairs.items()}
    tests = [st.signed_ranks(d) for d in more.values()]
    for row, p, adjusted in zip(table.rows, tests, st.holm(tests), strict=True):
        alone, after = pairs[row[0]]
        found = (
            plain(ends(alone)), plain(ends(after)), estimate(more[row[0]]), p_value(p), p_value(adjusted),
            str(len(alone)),
        )  # fmt: skip
        yield from row_of_cells(row, found, table.head)


TABLES: dict[str, Callable[[Table], Iterator[Cell]]] = {
    "distilled-adapter": pupils("wp1-rl", "wp1-taught"),
    "distilled-falling": pupils("wp1-rl-later", "wp1-taught-falling"),
    "distilled-bits": bits,
    "distilled-rl": before_rl,
}

NUMBERS: dict[str, Callable[[], str]] = {
    "distilled-difference": lambda: minus_teacher("wp1-rl", "wp1-taught"),
    "distilled-share-wp12": lambda: share("wp12-reverse"),
    "distilled-share-wp1": lambda: share("wp1-reverse"),
}
