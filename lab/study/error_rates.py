"""Rates of false claims of the two endpoints of a comparison, and the differences that they find.

Typical seed: differences of a pair of arms, shifted so that their centre (Hodges and Lehmann's) is 0, are
drawn with replacement, which keeps their skew and heavy tails, and tested as in `lab.study.endpoints`. Every
claim of a difference is then false; the level is the one that Holm's correction leaves to the smallest p
value of a study, or that of a single test. The same differences shifted by the margin show how often two arms
that differ by it are called equal, at the level that the correction over comparisons, half as many, leaves;
growing shifts show what is found with power .8. Share of runs: no draws are needed, as Fisher's test is
summed over all counts.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from lab.study.endpoints import Endpoint
from lab.study.results import Results
from lab.study.statistics import LEVEL, POWER, TIE, differences, hodges_lehmann, pairs_of_runs

STEPS = np.linspace(0, 0.3, 61)
"""Shifts of the centre, tried in order until one is found with power .8."""


def typical(d: np.ndarray, seeds: int, tests: int, draws: int, margin: float) -> dict[str, float]:
    """Rates of claims about the typical seed, from draws of differences whose centre is 0.

    Args:
        d: The differences [any number].
        seeds: Number of differences per draw.
        tests: Number of tests that Holm's correction counts, two per comparison; 1 for a single test.
        draws: Number of draws.
        margin: Difference that does not matter.

    Returns:
        `helps`, `harms`: rates of false claims. `equal`: rate of claims of no effect beyond the margin, with
        the centre at the margin. `detectable`: the smallest shift that is found with power .8, or NaN.
    """
    rng = np.random.default_rng(0)
    drawn = rng.choice(d, (draws, seeds))
    i, j = np.triu_indices(seeds)
    centre = np.array([np.median(row[i] + row[j]) / 2 for row in drawn])
    # Ties are broken at random, which does not change the level.
    x = drawn + rng.normal(0, TIE / 2, drawn.shape)
    least = critical(seeds, LEVEL / tests / 2)
    above = sums(x)
    most = seeds * (seeds + 1) // 2
    one_sided = most - critical(seeds, LEVEL / max(1, tests // 2))
    # At the upper end of the margin: below it by one test, and above -margin by the other.
    upper = (sums(-x) >= one_sided) & (sums(x + 2 * margin) >= one_sided)
    found = (float(shift) for shift in STEPS if np.mean(sums(x + shift) >= most - least) >= POWER)
    return {
        "helps": float(np.mean((above >= most - least) & (centre > TIE))),
        "harms": float(np.mean((above <= least) & (centre < -TIE))),
        "equal": float(np.mean(upper)),
        "detectable": next(found, float("nan")),
    }


def sums(x: np.ndarray) -> np.ndarray:
    """Sums [draws] of the ranks of positive x [draws, seeds] without ties."""
    ranks = np.abs(x).argsort(axis=1).argsort(axis=1) + 1
    return np.asarray((ranks * (x > 0)).sum(axis=1))


@cache
def critical(seeds: int, level: float) -> int:
    """Largest sum of positive ranks whose lower tail has at most this probability; -1 if there is none."""
    chances = np.ones(1)
    for rank in range(1, seeds + 1):
        chances = (np.append(chances, np.zeros(rank)) + np.append(np.zeros(rank), chances)) / 2
    return int(np.searchsorted(np.cumsum(chances), level, side="right")) - 1


def share(p: float, seeds: int, tests: int) -> dict[str, float]:
    """Rates of claims of Fisher's test about the share of runs in two arms.

    Args:
        p: Mean share of the two.
        seeds: Runs of each.
        tests: Number of tests that Holm's correction counts.

    Returns:
        `false`: how often a difference is claimed if both arms have share p. `found`: the smallest
        difference, of shares as near to that mean as 0 and 1 allow, that is found with power .8; NaN if there
        is none.
    """
    from scipy.stats import binom

    claims, k = _claims(seeds, tests), np.arange(seeds + 1)

    def claimed(apart: float) -> float:
        low = min(max(0.0, p - apart / 2), 1 - apart)
        return float(binom.pmf(k, seeds, low + apart) @ claims @ binom.pmf(k, seeds, low))

    found = (float(apart) for apart in np.linspace(0, 1, 101)[1:] if claimed(float(apart)) >= POWER)
    return {"false": claimed(0.0), "found": next(found, float("nan"))}


@cache
def _claims(seeds: int, tests: int) -> np.ndarray:
    """Whether Fisher's test claims a difference, by the counts of the first and the second arm."""
    from scipy.stats import fisher_exact

    counts = range(seeds + 1)
    p = [[fisher_exact([[a, seeds - a], [b, seeds - b]]).pvalue for b in counts] for a in counts]
    return np.array(p) * tests < LEVEL


@dataclass(frozen=True)
class Rates:
    """False claims and power of an endpoint.

    Attributes:
        false: How often a difference would be claimed if there were none: for the typical seed with the
            pair's own differences, shifted to a centre of 0; for the share with both arms at the mean of
            their shares.
        found: Smallest difference that is found with power .8: of centres up to .3, or of shares around that
            mean; NaN if there is none.
    """

    false: float
    found: float


def of_endpoint(results: Results, one: Endpoint, draws: int = 500) -> Rates:
    """Rates of an endpoint of a study, at the level that Holm's correction leaves to the smallest p value.

    Args:
        results: Results of the study.
        one: The endpoint.
        draws: Number of draws for the typical seed.
    """
    tests = 2 * sum(map(len, results.study.comparisons.values()))
    if one.kind == "typical":
        d = differences(pairs_of_runs(results, one.first, one.second))
        found = typical(d - hodges_lehmann(d), one.seeds, tests, draws, one.margin)
        return Rates(found["helps"] + found["harms"], found["detectable"])
    both = sum(one.counts) / (2 * one.seeds)
    found = share(both, one.seeds, tests)
    return Rates(found["false"], found["found"])
