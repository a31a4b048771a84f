"""How often two endpoints claim what is not so, and what they find, under differences as studies had them.

    python -m lab rates --seeds 64 --out bench/results/endpoint-rates.json

The typical seed: the differences of each planned comparison of the results, moved so that their centre
(Hodges and Lehmann's) is 0, are drawn with replacement, as skewed and heavy-tailed as they are, and tested
as `lab.study.endpoints` tests them. A claim is then false, at the level that Holm's correction leaves to the
smallest p of a study, or to the only one. The same differences moved by the margin say how often two arms
that differ by it are called equal; moved by more and more, what is found with power .8. The share of runs
needs no draws: Fisher's test is summed over all counts. Needs no GPU.
"""

import argparse
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import binom, fisher_exact

from bench.result import read_rows, write_result
from lab.study.statistics import LEVEL, POWER, TIE, hodges_lehmann
from lab.writers.captions import table
from lab.writers.draw import STUDIES
from lab.writers.study_tables import area, by_seed, pair_words, paired, study

RESULT = "endpoint-rates"
FILES = (*STUDIES.values(), "trust-regions-wp12")
TESTS = (1, 32)
"""Tests that Holm's correction counts: one, and as many as 16 comparisons have."""

MARGIN = 0.02
SHARES = (0.0, 0.05, 0.25, 0.5)
"""Of runs of the second arm that escape or collapse."""

STEPS = np.linspace(0, 0.3, 61)
"""Differences of centres that are tried until one is found."""


def shapes() -> dict[str, np.ndarray]:
    """Differences [seeds] with a centre of 0 of each planned comparison that has run, by study and arms."""
    found = {}
    for name in FILES:
        results = study(name)
        for pairs in results.study.comparisons.values() if results is not None else ():
            for first, second in pairs:
                d = paired(by_seed(name, first, area), by_seed(name, second, area))
                if len(d) > 1 and np.ptp(d):
                    found[f"{name}: {pair_words(first, second)}"] = d - hodges_lehmann(d)
    return found


def typical(d: np.ndarray, seeds: int, tests: int, draws: int) -> dict[str, float]:
    """Rates of claims about the typical seed, for draws of so many seeds from differences whose centre is 0.

    Returns:
        `helps`, `harms`: false claims. `equal`: of no effect beyond the margin, where the centre is at it.
        `detectable`: the smallest shift that is found with power .8, or NaN.
    """
    rng = np.random.default_rng(0)
    drawn = rng.choice(d, (draws, seeds))
    i, j = np.triu_indices(seeds)
    centre = np.array([np.median(row[i] + row[j]) / 2 for row in drawn])
    x = drawn + rng.normal(
        0, TIE / 2, drawn.shape
    )  # ties are broken by chance, which leaves the level as it is
    least = _critical(seeds, LEVEL / tests / 2)
    above = _sums(x)
    most = seeds * (seeds + 1) // 2
    one_sided = most - _critical(seeds, LEVEL / tests)
    # At the upper end of the margin: below it by one test, and above -margin by the other.
    upper = (_sums(-x) >= one_sided) & (_sums(x + 2 * MARGIN) >= one_sided)
    found = (float(shift) for shift in STEPS if np.mean(_sums(x + shift) >= most - least) >= POWER)
    return {
        "helps": float(np.mean((above >= most - least) & (centre > TIE))),
        "harms": float(np.mean((above <= least) & (centre < -TIE))),
        "equal": float(np.mean(upper)),
        "detectable": next(found, float("nan")),
    }


def _sums(x: np.ndarray) -> np.ndarray:
    """Sums [draws] of the ranks of positive x [draws, seeds] without ties."""
    ranks = np.abs(x).argsort(axis=1).argsort(axis=1) + 1
    return np.asarray((ranks * (x > 0)).sum(axis=1))


@cache
def _critical(seeds: int, level: float) -> int:
    """Largest sum of signed ranks that has no more than this probability, or less; -1 if none has."""
    chances = np.ones(1)
    for rank in range(1, seeds + 1):
        chances = (np.append(chances, np.zeros(rank)) + np.append(np.zeros(rank), chances)) / 2
    return int(np.searchsorted(np.cumsum(chances), level, side="right")) - 1


def share(p: float, seeds: int, tests: int) -> dict[str, float]:
    """Rate of false claims about the share of runs where both arms have share p, and the smallest larger
    share of the first that is found with power .8 (NaN if none is)."""
    claims = _claims(seeds, tests)

    def claimed(q: float) -> float:
        k = np.arange(seeds + 1)
        return float(binom.pmf(k, seeds, q) @ claims @ binom.pmf(k, seeds, p))

    larger = (float(q) for q in np.linspace(p, 1, 101) if q > p and claimed(float(q)) >= POWER)
    return {"false": claimed(p), "found": next(larger, float("nan"))}


@cache
def _claims(seeds: int, tests: int) -> np.ndarray:
    """Whether Fisher's test claims a difference for counts of the first and the second arm."""
    counts = range(seeds + 1)
    p = [[fisher_exact([[a, seeds - a], [b, seeds - b]]).pvalue for b in counts] for a in counts]
    return np.array(p) * tests < LEVEL


def rates_table() -> str:
    """What both endpoints claim falsely and what they find, over all shapes of differences."""
    rows, lines = read_rows(RESULT), []
    for tests in TESTS:
        of = [row for row in rows if row["endpoint"] == "typical" and row["tests"] == tests]
        for words, key in (("helps, falsely", "helps"), ("harms, falsely", "harms"),
                           (f"no effect beyond {MARGIN:g}, at it", "equal")):  # fmt: skip
            values = [row[key] for row in of]
            worst = max(of, key=lambda row: row[key])["differences"]
            lines.append(
                (f"typical seed: {words}", tests, f"{median(values):.3f}", f"{max(values):.3f}", worst)
            )
        values = [row["detectable"] for row in of if row["detectable"] is not None]
        lines.append(
            (f"typical seed: found in {POWER:.0%}", tests, f"{median(values):.3f}", f"{max(values):.3f}", "")
        )
        of = [row for row in rows if row["endpoint"] == "share" and row["tests"] == tests]
        for row in of:
            found = "none" if row["found"] is None else f"{row['found']:.0%}"
            words = f"share of runs, {row['share']:.0%} in both: more or fewer, falsely; found in {POWER:.0%}"
            lines.append((words, tests, f"{row['false']:.3f}", "", f"{found} beside {row['share']:.0%}"))
    first, of_shapes = rows[0], {row["differences"] for row in rows if row["endpoint"] == "typical"}
    return table(
        ("claim", "tests of the study", "rate, or difference: median", "largest", "of which"),
        lines,
        f"{first['seeds']} seeds, {first['draws']} draws from each of the {len(of_shapes)} planned "
        f"comparisons of all studies, moved to a centre of 0. {first['machine']}, {first['date'][:10]}, "
        f"commit {first['commit']}. File: {RESULT}.json.",
    )


def helps_on_words() -> str:
    """The largest rate of false *helps* on word problems, of one test."""
    rows = [row for row in read_rows(RESULT) if row["endpoint"] == "typical" and row["tests"] == 1]
    return f"{max(row['helps'] for row in rows if not row['differences'].startswith(STUDIES['needle'])):.3f}"


TABLES = {"endpoint-rates": rates_table}
NUMBERS = {"endpoint-helps-words": helps_on_words}


def main(arguments: list[str]) -> None:
    """Runs `python -m lab rates` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab rates", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for tests in TESTS:
        for name, d in shapes().items():
            found = typical(d, args.seeds, tests, args.draws)
            rows.append({"endpoint": "typical", "differences": name, "tests": tests, **_plain(found)})
        for p in SHARES:
            found = share(p, args.seeds, tests)
            rows.append({"endpoint": "share", "share": p, "tests": tests, **_plain(found)})
            print(rows[-1])
    if args.out:
        write_result(
            args.out, " ".join(["rates", *arguments]), rows, "lab", seeds=args.seeds, draws=args.draws
        )


def _plain(found: dict[str, float]) -> dict[str, float | None]:
    return {key: None if np.isnan(value) else round(value, 4) for key, value in found.items()}
