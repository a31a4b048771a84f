"""Probes of policies that do not learn: cells of their tables, recomputed from counts and sums per problem.

Legend: P problems; a cell of a probe is a policy, or a format, under a perturbation.
"""

from collections.abc import Callable, Iterator, Sequence

from lab.audit.cells import Cell, Table, row_of_cells
from lab.audit.raw import Estimate, Probe, probe
from lab.audit.words import TRAINED, signed

NAME, TASKS = "probe", ("wp12", "wp2")


def perturbations(table: Table) -> Iterator[Cell]:
    """Yield the effects of each perturbation at each KL on the untrained policy, and the clean policy's."""
    one, clean = probe(NAME), "start-wp12-clean"
    right, solved = (estimate(one, clean)[0] for estimate in (Probe.right, Probe.solved))
    words = (
        f"Clean: {right:.3f} of the samples are right, {solved:.3f} of the problems are solved by one of "
        f"theirs, with {one.mean(clean, 'answers')[0]:.1f} distinct answers each."
    )
    yield Cell("clean", words if words in table.text else "another sentence", words)
    cells = [name for name, cell in one.cells.items() if cell["policy"] == "start" and cell.get("target")]
    yield Cell("cells", str(len(table.rows)), str(len(cells)))
    for row, name in zip(table.rows, cells, strict=True):
        yield Cell(f"{name}, perturbation", row[0], one.cells[name]["what"])
        found = (
            f"{one.per_token(name, 'kl')[0]:.4f}", f"{one.per_token(name, 'entropy')[0]:.2f}",
            *_effects(one, name, clean), *(signed(*one.along(name, key)) for key in ("shift", "lift")),
            f"{one.mean(name, 'ess')[0]:.2f}",
        )  # fmt: skip
        yield from row_of_cells([name, *row[1:]], found, table.head)


def _effects(one: Probe, name: str, other: str) -> list[str]:
    """Format the effects of a cell on right samples, groups of 8, solved problems and distinct answers."""
    more = (one.right(name, other), one.gain(name, other), one.solved(name, other))
    return [*(signed(*each) for each in more), signed(*one.mean(name, "answers", other), 1)]


def at_equal_kl(table: Table) -> Iterator[Cell]:
    """Yield the gains of perturbations at equal KL, by policy; an empty cell was not measured."""
    gains = {
        (what, target, policy.replace("_", " ")): gain
        for name in (NAME, *TRAINED)
        for (policy, what, target), gain in probe(name).gains().items()
    }
    shown = {
        (row[0], float(row[1]), policy)
        for row in table.rows
        for policy, cell in zip(table.head[2:], row[2:], strict=True)
        if cell
    }
    targets = {target for _, target, policy in gains if policy != "start"}
    measured = {key for key in gains if key[1] in targets}
    yield Cell("cells that were measured", str(len(shown)), str(len(measured)))
    for row in table.rows:
        where = [f"{row[0]} {row[1]}", *row[2:]]
        keys = [(row[0], float(row[1]), policy) for policy in table.head[2:]]
        found = [signed(*gains[key]) if key in gains else "" for key in keys]
        yield from row_of_cells(where, found, ["", *table.head[2:]])


def formats(task: str) -> Callable[[Table], Iterator[Cell]]:
    """Return a function that yields the effects of formats on a task, at temperature 1 and matched to BF16's
    entropy; several draws of an error are a range."""

    def compute(table: Table) -> Iterator[Cell]:
        one, bf16 = probe(NAME), f"format-{task}-bf16-0-plain"
        measured = {
            (cell["what"], name.rpartition("-")[2])
            for name, cell in one.cells.items()
            if cell["policy"] is None and cell["task"] == task
        }
        yield Cell("formats", str(len(table.rows)), str(len(measured)))
        for at, row in enumerate(table.rows):
            kind = "matched" if row[0] in [each[0] for each in table.rows[:at]] else "plain"
            names = _draws(one, task, row[0], kind)
            own = [_of_format(one, name, bf16) for name in names]
            heats = [f"{one.cells[name]['temperature']:.3g}" for name in names]
            ends = [min(heats, key=float), max(heats, key=float)]
            found = [
                " to ".join(dict.fromkeys(ends)), f"{_error(one, task, row[0]):.3f}",
                *(_one_or_range(estimates, digits) for *estimates, digits in zip(*own, DIGITS, strict=True)),
            ]  # fmt: skip
            yield from row_of_cells([f"{row[0]}, {kind}", *row[1:]], found, table.head)

    return compute


DIGITS = (3, 3, 3, 3, 3, 1)
"""Digits of entropies, right samples, groups of 8, solved problems and distinct answers."""


def _draws(one: Probe, task: str, words: str, kind: str) -> list[str]:
    """Return the cells of a format's draws, and raise if the words of the row count others."""
    what, _, count = words.partition(", ")
    names = [
        name
        for name, cell in one.cells.items()
        if (cell["policy"], cell["task"], cell["what"]) == (None, task, what) and name.endswith(f"-{kind}")
    ]
    if (f"{len(names)} draws" if len(names) > 1 else "") != count:
        raise ValueError(f"The row of {words} on {task} has {len(names)} draws in {NAME}; correct the page.")
    return names


def _error(one: Probe, task: str, words: str) -> float:
    """Return the relative error of a format's weights, of its first draw."""
    return float(one.cells[_draws(one, task, words, "plain")[0]]["error"])


def _of_format(one: Probe, name: str, bf16: str) -> list[Estimate | None]:
    """Return the effects of a format; along given prefixes only at temperature 1, and of BF16 itself no
    other."""
    prefixes = one.prefix_more(name, bf16) if "prefixes" in one.cells[name] else None
    if name == bf16:
        return [None, prefixes, None, None, None, None]
    more = (one.right(name, bf16), one.gain(name, bf16), one.solved(name, bf16))
    return [one.entropy_more(name, bf16), prefixes, *more, one.mean(name, "answers", bf16)]


def _one_or_range(estimates: Sequence[Estimate | None], digits: int) -> str:
    known = [each for each in estimates if each is not None]
    if len(known) < 2:
        return signed(*known[0], digits) if known else ""
    values = [value for value, _, _ in known]
    return f"{min(values):+.{digits}f} to {max(values):+.{digits}f}"


def rounding(table: Table) -> Iterator[Cell]:
    """Yield the KL and the right samples of each format on both tasks; several draws are a range."""
    one = probe(NAME)
    for row in table.rows:
        names = [_draws(one, task, row[0], "plain") for task in TASKS]
        kls = [[one.along_prefixes(name, "kl") for name in each] for each in names]
        right = [[one.right(name) for name in each] for each in names]
        found = [
            f"{_error(one, TASKS[0], row[0]):.3f}",
            *("" if row[0] == "bf16" else _least_to_most(each) for each in kls),
            *map(_least_to_most, right),
        ]
        yield from row_of_cells(row, found, table.head)


def _least_to_most(estimates: Sequence[Estimate]) -> str:
    ends = estimates[0][1:] if len(estimates) == 1 else None
    values = [value for value, _, _ in estimates]
    if ends is None:
        return f"{min(values):.3f} to {max(values):.3f}"
    return f"{values[0]:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"


TABLES: dict[str, Callable[[Table], Iterator[Cell]]] = {
    "probe-noise": perturbations,
    "probe-beside": at_equal_kl,
    "probe-formats": formats("wp12"),
    "probe-formats-wp2": formats("wp2"),
    "rounding-kl": rounding,
}
