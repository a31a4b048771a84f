"""The cost of rows refilled across steps for SmolLM2: cells and numbers of the pages, from the runs.

Legend: a run is a row of the file; N seeds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lab.audit import statistics as st
from lab.audit.cells import Cell, Table, row_of_cells
from lab.audit.distilled import ends, runs
from lab.audit.words import NOT_RUN, centre, p_value

FILE = "refilled-smollm2.json"
MARGIN, SEEDS = 0.02, 32
ORDER = ["refilled-1", "refilled-2", "refilled-4"]
WORDS = {
    "0": "synchronous", "1": "refilled-1", "2": "refilled-2", "4": "refilled-4",
    "4, no ratio": "uncorrected-4",
}  # fmt: skip
"""Arms by the words of the table."""

Row = dict[str, Any]


def difference(arm: str, value: Callable[[Row], Any], control: str = "synchronous") -> st.Array:
    """Return a value of an arm's runs minus that of the control's, paired by seed, [N]."""
    return np.array([value(run) - value(other) for run, other in runs(arm, control, file=FILE)])


def end(run: Row) -> float:
    """Return the accuracy after the last step."""
    return float(run["accuracy"][-1])


def area(run: Row) -> float:
    """Return the mean height of the accuracy curve, by trapezoids."""
    at, height = np.array(run["steps"], float), np.array(run["accuracy"])
    return float(((height[1:] + height[:-1]) / 2 * np.diff(at)).sum() / at[-1])


def at_equal_time(arm: str) -> st.Array:
    """Return final accuracies of an arm minus the synchronous accuracy at equal simulated seconds, [N]."""
    found = []
    for run, other in runs(arm, "synchronous", file=FILE):
        found.append(end(run) - _on_line(sum(run["of_7b"]), other, "of_7b"))
    return np.array(found)


def at_equal_tokens(arm: str) -> st.Array:
    """Return accuracies of an arm minus the synchronous ones, where the one with fewer tokens ends, [N]."""
    found = []
    for run, other in runs(arm, "synchronous", file=FILE):
        shorter, longer = sorted((run, other), key=lambda each: sum(each["tokens"]))
        apart = end(shorter) - _on_line(sum(shorter["tokens"]), longer, "tokens")
        found.append(apart if shorter is run else -apart)
    return np.array(found)


def _on_line(at: float, run: Row, of: str) -> float:
    """Return the accuracy at a sum over steps by linear interpolation; after the last sum, the last one."""
    clock, heights = [sum(run[of][:step]) for step in run["steps"]], run["accuracy"]
    for i in range(1, len(clock)):
        if at <= clock[i]:
            share = (at - clock[i - 1]) / (clock[i] - clock[i - 1])
            return heights[i - 1] + share * (heights[i] - heights[i - 1])
    return end(run)


def judged(arm: str) -> tuple[float, float, str]:
    """Return two one-sided p of an arm and its claims.

    The first p, Holm-corrected over the three arms, is that the arm costs something; the second that it costs
    no more than the margin. Each is claimed below .025, the second only if it holds for all earlier arms too.
    """
    d = [difference(other, end) for other in ORDER]
    costs = st.holm([st.ranks_above(-own) if len(own) == SEEDS else 1.0 for own in d])
    no_more = [st.ranks_above(own + MARGIN) if len(own) == SEEDS else 1.0 for own in d]
    at = ORDER.index(arm)
    said = ["costs"] if costs[at] < st.LEVEL / 2 else []
    if max(no_more[: at + 1]) < st.LEVEL / 2:
        said.append("no more than 0.02")
    return costs[at], no_more[at], ", ".join(said) or "undecided"


def learned(table: Table) -> Iterator[Cell]:
    """Yield the cells of the table of arms."""
    for row in table.rows:
        arm = WORDS[row[0]]
        own = [run for (run,) in runs(arm, file=FILE)]
        if not own:
            yield from row_of_cells(row, [NOT_RUN] * (len(row) - 1), table.head)
            continue
        start = np.array([run["accuracy"][0] for run in own])
        age, effective, seconds = (
            np.mean([np.mean([v for v in run.get(name, [0]) if v is not None]) for run in own])
            for name in ("age", "effective", "of_7b")
        )
        found = [
            f"{np.mean([sum(run['tokens']) for run in own]) / 1000:.0f}",
            f"{start.mean():.3f} to {ends(own).mean():.3f}",
            f"{(ends(own) < start).sum()} of {len(own)}",
            f"{age:.2f}" if "age" in own[0] else "0",
            f"{effective:.3f}",
            f"{seconds:.2f}",
        ]
        if arm == "synchronous":
            found += [""] * 7
        else:
            d = difference(arm, end)
            claim = ["" if len(d) > 1 else NOT_RUN] * 3
            if arm in ORDER and len(d) > 1:
                costs, no_more, said = judged(arm)
                claim = [p_value(costs), p_value(no_more), f"**{said}**"]
            beside = at_equal_tokens(arm), at_equal_time(arm), difference(arm, area)
            found += [centre(d), *claim, *map(centre, beside)]
        yield from row_of_cells(row, found, table.head)


def without_ratio() -> str:
    """Format the final accuracies without any ratio to the sampler minus those with it."""
    return centre(difference("uncorrected-4", end, "refilled-4"))


def costs(arm: str) -> str:
    """Format the difference at equal steps and its claim."""
    d = difference(arm, end)
    return f"{centre(d)}, {judged(arm)[2]}" if len(d) > 1 else NOT_RUN


def least(run: Row) -> float:
    """Return the smallest effective sample size of a step."""
    return float(np.nanmin(np.array(run["effective"], float)))


def least_effective() -> str:
    """Format the smallest effective sample size of refilled-4, and its run's first and last accuracy."""
    own = sorted((run for (run,) in runs("refilled-4", file=FILE)), key=least)
    if not own:
        return NOT_RUN
    curve = own[0]["accuracy"]
    went = f"from {curve[0]:.3f} before RL to {curve[-1]:.3f}"
    return f"{least(own[0]):.3f}, in a run whose accuracy went {went}"


def as_low() -> str:
    """Format the share of the runs without any ratio that fell in which a step was as low as that."""
    own, other = ([run for (run,) in runs(arm, file=FILE)] for arm in ("refilled-4", "uncorrected-4"))
    if not own or not other:
        return NOT_RUN
    fell = [least(run) for run in other if end(run) < run["accuracy"][0]]
    return f"{(np.array(fell) <= min(map(least, own))).sum()} of {len(fell)}"


TABLES: dict[str, Callable[[Table], Iterator[Cell]]] = {"refilled-learned": learned}

NUMBERS: dict[str, Callable[[], str]] = {
    "refilled-costs-1": lambda: costs("refilled-1"),
    "refilled-costs-2": lambda: costs("refilled-2"),
    "refilled-costs-4": lambda: costs("refilled-4"),
    "refilled-without-ratio": without_ratio,
    "refilled-least-effective": least_effective,
    "refilled-as-low": as_low,
}
