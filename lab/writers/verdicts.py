"""How often a study claims an effect where the means of two arms do not differ.

    python -m lab verdicts --out bench/results/verdicts.json

Differences of 32 seeds are drawn again and again from distributions whose mean is 0, and judged by the
laboratory's own statistics: as a study's one comparison, and as the one of many with the smallest p value.
Symmetric differences are what two equal arms have. Skewed ones have a mean of 0 as well, but the arms are not
equal: one is a little better, and collapses now and then. Needs no GPU.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.result import write_result
from lab.study.statistics import LEVEL, Comparison, bca, wilcoxon
from lab.writers.draw import STUDIES
from lab.writers.study_tables import area, by_seed, paired

SEEDS = 32
COMPARISONS = (1, 40)
COLLAPSE = 0.17
"""By how much a collapsed run's area is below that of its pair, about as in the study of `wp12`."""

Draw = Callable[[np.random.Generator], np.ndarray]


def kinds() -> dict[str, Draw]:
    """Ways of drawing the differences [seeds] of a comparison, by what they are."""
    name = STUDIES["wp12"]
    seen = paired(by_seed(name, "aqn", area), by_seed(name, "none", area))

    def collapsing(rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(SEEDS) < 0.06, -COLLAPSE, 0.06 * COLLAPSE / 0.94) + rng.normal(
            0, 0.02, SEEDS
        )

    return {
        "normal": lambda rng: rng.normal(0, seen.std(ddof=1), SEEDS),
        "those of aqn \N{MINUS SIGN} none, centred": lambda rng: rng.choice(seen - seen.mean(), SEEDS),
        "6 % collapse, the others gain": collapsing,
    }


def rates(draw: Draw, comparisons: int, draws: int) -> dict[str, float]:
    """Shares of draws that are claimed to help and to harm, and whose interval of the mean leaves out 0.

    Args:
        draw: The differences of a comparison.
        comparisons: Of the study; this one has the smallest p value.
        draws: How many are judged.
    """
    rng = np.random.default_rng(0)
    found = {"helps": 0, "harms": 0, "outside": 0}
    for _ in range(draws):
        d = draw(rng)
        p, interval = wilcoxon(d), bca(d)
        one = Comparison(
            family="", first="", second="", seeds=len(d), mean=float(d.mean()), sd=float(d.std(ddof=1)),
            interval=interval, p=p, holm=min(1.0, p * comparisons), p_equivalent=1.0, equivalence=LEVEL,
            detectable=0.0, collapses=(0, 0), differences=tuple(map(float, d)), apart=0,
        )  # fmt: skip
        found["outside"] += interval[0] * interval[1] > 0
        if one.verdict in found:
            found[one.verdict] += 1
    return {word: count / draws for word, count in found.items()}


def main(arguments: list[str]) -> None:
    """Runs `python -m lab verdicts` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab verdicts", description=__doc__.split("\n")[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    found: list[dict[str, Any]] = [
        {"differences": kind, "comparisons": comparisons, **rates(draw, comparisons, args.draws)}
        for kind, draw in kinds().items()
        for comparisons in COMPARISONS
    ]
    for row in found:
        print(row)
    if args.out:
        command = f"verdicts --draws {args.draws} --out {args.out}"
        write_result(args.out, command, found, "lab", draws=args.draws)
