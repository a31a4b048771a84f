"""Rates of false claims of both endpoints, and the differences they find, for differences seen in studies.

    python -m lab rates --seeds 64 --out bench/results/endpoint-rates.json
    python -m lab rates --seeds 12 --tests 8 --out bench/results/endpoint-rates-12.json

The method is that of `lab.study.error_rates`; the differences are those of each planned comparison of the
results. Needs no GPU.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.result import read_rows, write_result
from lab.study.error_rates import share, typical
from lab.study.statistics import POWER, hodges_lehmann
from lab.writers.captions import table
from lab.writers.draw import STUDIES
from lab.writers.study_tables import area, by_seed, pair_words, paired, study

RESULT, SMALL = "endpoint-rates", "endpoint-rates-12"
"""Results for studies of this project's size, and for the smallest others run (`lab.study.replicate`)."""

FILES = (*STUDIES.values(), "trust-regions-wp12")
TESTS = (1, 32)
"""Default numbers of tests that Holm's correction counts: one, and those of 16 comparisons."""

MARGIN = 0.02
SHARES = (0.0, 0.05, 0.25, 0.5)
"""Mean shares, over two arms, of runs that escape or collapse."""


def shapes() -> dict[str, np.ndarray]:
    """Return the differences [seeds], moved to a centre of 0, of each planned comparison that has run."""
    found = {}
    for name in FILES:
        for pairs in study(name).study.comparisons.values():
            for first, second in pairs:
                d = paired(by_seed(name, first, area), by_seed(name, second, area))
                if len(d) > 1 and np.ptp(d):
                    found[f"{name}: {pair_words(first, second)}"] = d - hodges_lehmann(d)
    return found


def rates_table(name: str) -> str:
    """Return the table of both endpoints' false claims and detectable differences, over all `shapes`."""
    rows, lines = read_rows(name), []
    for tests in dict.fromkeys(row["tests"] for row in rows):
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
            found = "none" if row["found"] is None else f"{row['found']:.2f} apart"
            words = f"share of runs, mean {row['share']:.0%}: more or fewer, falsely; found in {POWER:.0%}"
            lines.append((words, tests, f"{row['false']:.3f}", "", found))
    first, of_shapes = rows[0], {row["differences"] for row in rows if row["endpoint"] == "typical"}
    return table(
        ("claim", "tests of the study", "rate, or difference: median", "largest", "of which"),
        lines,
        f"{first['seeds']} seeds, {first['draws']} draws from each of the {len(of_shapes)} planned "
        f"comparisons of all studies, moved to a centre of 0; shares lie around their mean as far as 0 and 1 "
        f"allow. {first['machine']}, {first['date'][:10]}, "
        f"commit {first['commit']}. File: {name}.json.",
    )


def helps_on_words() -> str:
    """Return the largest rate of false *helps* on word problems, with one test."""
    rows = [row for row in read_rows(RESULT) if row["endpoint"] == "typical" and row["tests"] == 1]
    return f"{max(row['helps'] for row in rows if not row['differences'].startswith(STUDIES['needle'])):.3f}"


TABLES = {name: partial(rates_table, name) for name in (RESULT, SMALL)}
NUMBERS = {"endpoint-helps-words": helps_on_words}


def main(arguments: list[str]) -> None:
    """Run `python -m lab rates` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab rates", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--tests", type=int, nargs="+", default=TESTS)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for tests in args.tests:
        for name, d in shapes().items():
            found = typical(d, args.seeds, tests, args.draws, MARGIN)
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
