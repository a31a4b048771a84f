"""Two endpoints of a comparison: the typical seed, and the share of runs that escape or collapse.

Differences of areas mix two effects: how much better a typical run is, and how often a run collapses or
escapes. A mean that depends on a few collapses shows neither, and for skewed differences tests of the mean
claim too much. So each comparison of a study has two endpoints:

- **the typical seed**: Hodges and Lehmann's centre of the paired differences of areas, its interval by the
  signed-rank test, and that test;
- **the share**: of runs that end above `escape_above` in `escape_key` if the study has it, else of runs that
  end below `collapse_below`, by Fisher's exact test; the interval of the difference is Newcombe's (1998,
  method 11).

If most seeds do not differ at all, which the signed-rank test leaves out, the typical seed does not differ,
and no claim is made about it. Holm's correction counts all tests, two per comparison. No effect beyond the
margin can be claimed for the typical seed only: by two one-sided signed-rank tests, corrected too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lab.study.results import Results, RunResult
from lab.study.statistics import (
    FEWEST,
    LEVEL,
    TIE,
    differences,
    hodges_lehmann,
    hodges_lehmann_interval,
    holm,
    pairs_of_runs,
    signed_rank_above,
    wilcoxon,
)
from qerl.eval.interval import score_interval

Kind = Literal["typical", "share"]


@dataclass(frozen=True)
class Endpoint:
    """One endpoint of a comparison.

    Attributes:
        family, first, second: As in `lab.study.statistics.Comparison`.
        kind: `typical` or `share`.
        seeds: Number of seeds that both arms have finished.
        difference: First minus second: of areas, or of shares of runs.
        interval: 95 % interval of the difference.
        counts: Runs of each arm that escaped or collapsed.
        p: p value of its test, uncorrected.
        holm: p corrected over both endpoints of all comparisons.
        p_equivalent: p value of the test that the centre is within the margin, corrected over all
            comparisons; 1 for shares.
        margin: The study's `equivalence`.
    """

    family: str
    first: str
    second: str
    kind: Kind
    seeds: int
    difference: float
    interval: tuple[float, float]
    counts: tuple[int, int]
    p: float
    holm: float
    p_equivalent: float
    margin: float

    @property
    def verdict(self) -> str:
        """The claim about the first arm: `helps` or `harms` for the typical seed, `more` or `fewer` for the
        share of runs, `no effect beyond +-.02`, or `undecided`."""
        above, below = ("helps", "harms") if self.kind == "typical" else ("more", "fewer")
        if self.holm < LEVEL and abs(self.difference) > TIE:
            return above if self.difference > 0 else below
        margin = f"{self.margin:g}".removeprefix("0")
        return f"no effect beyond \N{PLUS-MINUS SIGN}{margin}" if self.p_equivalent < LEVEL else "undecided"


def endpoints(results: Results) -> list[Endpoint]:
    """Both endpoints of all comparisons of a study that have enough finished seeds, in the study's order."""
    planned = [
        (family, first, second, pairs_of_runs(results, first, second))
        for family, pairs in results.study.comparisons.items()
        for first, second in pairs
    ]
    there = [one for one in planned if len(one[-1]) >= FEWEST]
    not_yet = [1.0] * (len(planned) - len(there))  # counted, or looking early would make claims easier
    margin = results.study.equivalence
    each = [differences(rows) for *_, rows in there]
    counts = [_counts(results, rows) for *_, rows in there]
    p_typical = [wilcoxon(d) for d in each]
    p_share = [fisher(*both, len(d)) for both, d in zip(counts, each, strict=True)]
    corrected = holm([*p_typical, *p_share, *not_yet, *not_yet])
    equal = holm([*(within(d, margin) for d in each), *not_yet])
    found = []
    for at, ((family, first, second, _), d, both) in enumerate(zip(there, each, counts, strict=True)):
        pair, seeds = (family, first, second), len(d)
        found += [
            Endpoint(*pair, "typical", seeds, hodges_lehmann(d), hodges_lehmann_interval(d), both,
                     p_typical[at], corrected[at], equal[at], margin),
            Endpoint(*pair, "share", seeds, (both[0] - both[1]) / seeds, newcombe(*both, seeds), both,
                     p_share[at], corrected[len(there) + at], 1.0, margin),
        ]  # fmt: skip
    return found


def within(d: np.ndarray, margin: float) -> float:
    """Larger p value of the two one-sided signed-rank tests that d [seeds] has a centre within +- margin."""
    return max(signed_rank_above(margin + d), signed_rank_above(margin - d))


def fisher(first: int, second: int, runs: int) -> float:
    """Two-sided p value of Fisher's exact test for counts of two arms with equally many runs."""
    from scipy.stats import fisher_exact

    return float(fisher_exact([[first, runs - first], [second, runs - second]]).pvalue)


def newcombe(first: int, second: int, runs: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares, from Wilson's of each with continuity correction."""
    shares = np.array([first, second]) / runs
    (low_1, high_1), (low_2, high_2) = (score_interval(float(share), runs) for share in shares)
    difference = float(shares[0] - shares[1])
    down = np.hypot(shares[0] - low_1, high_2 - shares[1])
    up = np.hypot(high_1 - shares[0], shares[1] - low_2)
    return float(difference - down), float(difference + up)


def _counts(results: Results, rows: Sequence[tuple[RunResult, RunResult]]) -> tuple[int, int]:
    counted = results.collapsed if results.study.escape_above is None else results.escaped
    return sum(counted(one) for one, _ in rows), sum(counted(other) for _, other in rows)
