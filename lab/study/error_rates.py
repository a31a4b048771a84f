"""How often the two endpoints of a comparison claim what is not so, and what they find.

The typical seed: differences of a pair of arms, moved so that their centre (Hodges and Lehmann's) is 0, are
drawn with replacement, as skewed and heavy-tailed as they are, and tested as `lab.study.endpoints` tests
them. A claim is then false, at the level that Holm's correction leaves to the smallest p of a study, or to
the only one. The same differences moved by the margin say how often two arms that differ by it are called
equal, at the level that the correction over comparisons, half as many, leaves; moved by more and more, what
is found with power .8. The share of runs needs no draws: Fisher's test is summed over all counts.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from lab.study.endpoints import Endpoint
from lab.study.results import Results
from lab.study.statistics import LEVEL, POWER, TIE, differences, hodges_lehmann, pairs_of_runs

STEPS = np.linspace(0, 0.3, 61)
"""Differences of centres that are tried until one is found."""


def typical(d: np.ndarray, seeds: int, tests: int, draws: int, margin: float) -> dict[str, float]:
    """Rates of claims about the typical seed, for draws of so many seeds from differences whose centre is 0.

    Args:
        d: The differences [any number].
        seeds: How many are drawn.
        tests: That Holm's correction counts, two for each comparison; 1 for one test alone.
        draws: How often.
        margin: Difference that does not matter.

    Returns:
        `helps`, `harms`: false claims. `equal`: of no effect beyond the margin, where the centre is at it.
        `detectable`: the smallest shift that is found with power .8, or NaN.
    """
    rng = np.random.default_rng(0)
    drawn = rng.choice(d, (draws, seeds))
    i, j = np.triu_indices(seeds)
    centre = np.array([np.median(row[i] + row[j]) / 2 for row in drawn])
    # Ties are broken by chance, which leaves the level as it is.
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
    """Largest sum of signed ranks that has no more than this probability, or less; -1 if none has."""
    chances = np.ones(1)
    for rank in range(1, seeds + 1):
        chances = (np.append(chances, np.zeros(rank)) + np.append(np.zeros(rank), chances)) / 2
    return int(np.searchsorted(np.cumsum(chances), level, side="right")) - 1


def share(p: float, seeds: int, tests: int) -> dict[str, float]:
    """What Fisher's test says of the share of runs in two arms.

    Args:
        p: Mean share of the two.
        seeds: Runs of each.
        tests: That Holm's correction counts.

    Returns:
        `false`: how often a difference is claimed where both have p. `found`: the smallest difference, of
        shares as near to that mean as 0 and 1 allow, that is found with power .8; NaN if none is.
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
    """Whether Fisher's test claims a difference for counts of the first and the second arm."""
    from scipy.stats import fisher_exact

    counts = range(seeds + 1)
    p = [[fisher_exact([[a, seeds - a], [b, seeds - b]]).pvalue for b in counts] for a in counts]
    return np.array(p) * tests < LEVEL


@dataclass(frozen=True)
class Rates:
    """How much an endpoint's verdict is worth.

    Attributes:
        false: How often a difference would be claimed if there were none: the typical seed's as the pair's
            own differences are, moved to a centre of 0; the share's where both arms have the mean share of
            the two.
        found: Smallest difference that is found with power .8: of centres up to .3, or of shares around that
            mean; NaN where none is.
    """

    false: float
    found: float


def of_endpoint(results: Results, one: Endpoint, draws: int = 500) -> Rates:
    """The rates of an endpoint of a study, at the level that Holm's correction leaves to the smallest p.

    Args:
        results: Of the study.
        one: The endpoint.
        draws: Of differences of the typical seed.
    """
    tests = 2 * sum(map(len, results.study.comparisons.values()))
    if one.kind == "typical":
        d = differences(pairs_of_runs(results, one.first, one.second))
        found = typical(d - hodges_lehmann(d), one.seeds, tests, draws, one.margin)
        return Rates(found["helps"] + found["harms"], found["detectable"])
    both = sum(one.counts) / (2 * one.seeds)
    found = share(both, one.seeds, tests)
    return Rates(found["false"], found["found"])
