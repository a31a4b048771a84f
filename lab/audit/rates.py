"""How often verdicts are wrong, simulated again on the differences of the studies.

Legend: N seeds of a draw, D draws, R resamples.
"""

from collections.abc import Callable, Iterator
from functools import cache
from statistics import median

import numpy as np

from lab.audit import statistics as st
from lab.audit.cells import Cell, Table, row_of_cells
from lab.audit.raw import read, study
from lab.audit.words import MINUS, TASKS, TRUST

DRAWS, MARGIN, SHARES = 2000, 0.02, (0.0, 0.05, 0.25, 0.5)
SIZES = {"endpoint-rates": (64, (1, 32)), "endpoint-rates-12": (12, (8,))}
"""Seeds of a draw and numbers of tests, by table."""

Rates = dict[str, float]


@cache
def simulated(seeds: int, counts: tuple[int, ...]) -> dict[int, dict[str, Rates]]:
    """Return the rates of each planned comparison that has run, by number of tests and comparison."""
    found: dict[int, dict[str, Rates]] = {tests: {} for tests in counts}
    for name in (*TASKS.values(), TRUST):
        for first, second in study(name).pairs:
            d = study(name).paired(first, second)
            if len(d) < 2 or not np.ptp(d):
                continue
            redrawn = st.Redrawn(d, seeds, DRAWS)
            for tests, rates in found.items():
                helps, harms = redrawn.false(tests)
                equal, detectable = redrawn.equal(tests, MARGIN), redrawn.found(tests)
                rates[f"{name}: {first}{MINUS}{second}"] = {
                    "helps": helps, "harms": harms, "equal": equal, "detectable": detectable,
                }  # fmt: skip
    return found


def two_endpoints(table: Table) -> Iterator[Cell]:
    """Yield the rates of false claims of both endpoints, and what they find."""
    seeds, counts = SIZES[table.name]
    lines = []
    for tests, rates in simulated(seeds, counts).items():
        for key in ("helps", "harms", "equal", "detectable"):
            values = {name: each[key] for name, each in rates.items() if not np.isnan(each[key])}
            worst = max(values, key=lambda name: values[name])
            named = "" if key == "detectable" else worst
            lines.append((str(tests), f"{median(values.values()):.3f}", f"{values[worst]:.3f}", named))
        for share in SHARES:
            false, found = st.rates_of_share(share, seeds, tests)
            apart = "none" if np.isnan(found) else f"{found:.2f} apart"
            lines.append((str(tests), f"{false:.3f}", "", apart))
    for row, found_here in zip(table.rows, lines, strict=True):
        yield from row_of_cells(row, found_here, table.head)


def helps_on_words() -> str:
    """Return the largest rate of false *helps* on word problems, with one test."""
    rates = simulated(*SIZES["endpoint-rates"])[1]
    return f"{max(each['helps'] for name, each in rates.items() if TASKS['needle'] not in name):.3f}"


N, COLLAPSES, FALLS = 32, 0.06, 0.17
"""Seeds of a draw of the verdict of means; share of seeds that collapse, and by how much."""

Draw = Callable[[np.random.Generator], st.Array]


def kinds() -> dict[str, Draw]:
    """Return functions that draw differences with a mean of 0, [N]."""
    seen = study(TASKS["wp12"]).paired("aqn", "none")

    def collapsing(rng: np.random.Generator) -> st.Array:
        gains = COLLAPSES * FALLS / (1 - COLLAPSES)
        return np.where(rng.random(N) < COLLAPSES, -FALLS, gains) + rng.normal(0, 0.02, N)

    return {
        "normal": lambda rng: rng.normal(0, seen.std(ddof=1), N),
        f"those of aqn{MINUS}none, centred": lambda rng: rng.choice(seen - seen.mean(), N),
        "6 % collapse, the others gain": collapsing,
    }


@cache
def verdicts_of_means(kind: str, draws: int) -> tuple[st.Array, st.Array]:
    """Return per draw the signed ranks' p, and 1 or -1 if the mean's interval and the centre agree on that
    side of 0, 2 if the interval alone leaves it out, else 0, both [D]."""
    rng, draw = np.random.default_rng(0), kinds()[kind]
    p, side = np.ones(draws), np.zeros(draws)
    for at in range(draws):
        d = draw(rng)
        p[at] = st.signed_ranks(d)
        low, high = st.bca(d)
        if low > 0 or high < 0:
            side[at] = np.sign(d.mean()) if d.mean() * st.hodges_lehmann(d) > 0 else 2
    return p, side


def of_means(table: Table) -> Iterator[Cell]:
    """Yield the rates of false claims of the verdict of means."""
    draws = read("verdicts.json")["draws"]
    for row in table.rows:
        p, side = verdicts_of_means(row[0], draws)
        claimed = p * int(row[1]) < st.LEVEL
        shares = (claimed & (side == 1), claimed & (side == -1), side != 0)
        found = (row[1], *(f"{share.mean():.3f}" for share in shares))
        yield from row_of_cells(row, found, table.head)


TABLES: dict[str, Callable[[Table], Iterator[Cell]]] = {
    "verdict-rates": of_means,
    "endpoint-rates": two_endpoints,
    "endpoint-rates-12": two_endpoints,
}

NUMBERS: dict[str, Callable[[], str]] = {"endpoint-helps-words": helps_on_words}
