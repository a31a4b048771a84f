"""The formulas behind a study's verdicts, in numpy: resampling, signed ranks, Student's t, Holm.

Written from their definitions, not from `lab.study.statistics`; the tests compare the two.

Legend: N seeds, R resamples; d [N] are differences of two arms, paired by seed.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEVEL, POWER = 0.05, 0.8
TIE = 2e-6
"""Absolute differences no farther apart than this are ties, and no larger than this are 0: results have six
digits."""

NORMAL = NormalDist()


@cache
def times(seeds: int, resamples: int) -> Array:
    """Return how often each resample contains each seed, [R, N]; numpy's default generator, seeded with 0."""
    drawn = np.random.default_rng(0).integers(seeds, size=(resamples, seeds))
    flat = np.bincount((drawn + seeds * np.arange(resamples)[:, None]).ravel(), minlength=seeds * resamples)
    return flat.reshape(resamples, seeds).astype(np.float64)


def bca(d: Array, resamples: int = 10_000) -> tuple[float, float]:
    """Return Efron's bias-corrected and accelerated 95 % interval of the mean of d."""
    if np.ptp(d) == 0:
        return float(d[0]), float(d[0])
    means = times(len(d), resamples) @ d / len(d)
    return _corrected(means, d.mean(), (d.sum() - d) / (len(d) - 1))


def bca_ratio(part: Array, whole: Array, resamples: int = 10_000) -> tuple[float, float]:
    """Return the BCa interval of mean(part) / mean(whole), both [N], resampled with the same seeds."""
    drawn = times(len(part), resamples)
    left_out = (part.sum() - part) / (whole.sum() - whole)
    return _corrected((drawn @ part) / (drawn @ whole), part.sum() / whole.sum(), left_out)


def _corrected(resampled: Array, found: float, left_out: Array) -> tuple[float, float]:
    """Return the BCa interval of a statistic, from its values per resample [R] and without each seed [N]."""
    below = (np.sum(resampled < found) + np.sum(resampled <= found)) / (2 * len(resampled))
    bias = NORMAL.inv_cdf(float(below))
    away = left_out.mean() - left_out
    acceleration = float(np.sum(away**3) / (6 * np.sum(away**2) ** 1.5))
    ends = []
    for tail in (LEVEL / 2, 1 - LEVEL / 2):
        z = bias + NORMAL.inv_cdf(tail)
        ends.append(NORMAL.cdf(bias + z / (1 - acceleration * z)))
    low, high = np.quantile(resampled, ends)
    return float(low), float(high)


def percentile(values: Array, resamples: int = 2000) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of values [N]."""
    low, high = np.quantile(times(len(values), resamples) @ values / len(values), [0.025, 0.975])
    return float(low), float(high)


def hodges_lehmann(d: Array) -> float:
    """Return the median of the means of all pairs, including each seed with itself."""
    return float(np.median([(d[i] + d[j]) / 2 for i in range(len(d)) for j in range(i, len(d))]))


def centre_interval(d: Array) -> tuple[float, float]:
    """Return an interval of the Hodges-Lehmann centre with a level of at least 95 %, from 6 seeds on.

    The k smallest and the k largest of the sorted means of pairs are cut, where k is the largest rank sum
    with P(sum <= k) of at most .025; with fewer than 6 seeds none is cut.
    """
    means = sorted((d[i] + d[j]) / 2 for i in range(len(d)) for j in range(i, len(d)))
    cut = max(0, largest_rejected(len(d), LEVEL / 2))
    return float(means[cut]), float(means[-1 - cut])


def ranks_above(d: Array) -> float:
    """Return the one-sided p of the signed-rank test that the centre is above 0."""
    return _tails(d)[1]


def fisher(first: int, second: int, runs: int) -> float:
    """Return the two-sided p of Fisher's exact test of two counts out of ``runs`` runs each: the probability
    of all tables with the same margins that are no likelier than this one."""
    total = first + second
    tables = {
        k: math.comb(runs, k) * math.comb(runs, total - k)
        for k in range(max(0, total - runs), min(runs, total) + 1)
    }
    return sum(w for w in tables.values() if w <= tables[first]) / math.comb(2 * runs, total)


def newcombe(first: int, second: int, runs: int) -> tuple[float, float]:
    """Return Newcombe's interval (1998, method 11) of the difference of two shares, from Wilson's intervals
    with continuity correction."""
    (p, low_p, high_p), (q, low_q, high_q) = (wilson(count, runs) for count in (first, second))
    return p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q)


def wilson(count: int, runs: int) -> tuple[float, float, float]:
    """Return a share and its Wilson interval, continuity corrected (Newcombe 1998, one share, method 4)."""
    p, z = count / runs, NORMAL.inv_cdf(1 - LEVEL / 2)
    ends = [0.0, 1.0]
    for side, sign in enumerate((-1, 1)):
        if count != (0, runs)[side]:
            inside = z * z + sign * 2 - 1 / runs + 4 * p * (runs * (1 - p) - sign)
            ends[side] = (2 * runs * p + z * z + sign * (1 + z * math.sqrt(inside))) / (2 * (runs + z * z))
    return p, ends[0], ends[1]


def signed_ranks(d: Array) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test of d: twice the share of the 2^N choices of signs
    whose rank sum is at least as extreme."""
    return min(1.0, 2 * min(_tails(d)))


def _tails(d: Array) -> tuple[float, float]:
    """Return the probabilities of a sum of doubled midranks at most, and at least, that of d."""
    kept = sorted((float(x) for x in d if abs(x) > TIE), key=abs)
    if not kept:
        return 1.0, 1.0
    groups: list[list[float]] = []
    for x in kept:
        if groups and abs(x) - abs(groups[-1][-1]) <= TIE:
            groups[-1].append(x)
        else:
            groups.append([x])
    ranks, positive, before = [], 0, 0
    for group in groups:
        twice = 2 * before + len(group) + 1
        ranks += [twice] * len(group)
        positive += twice * sum(x > 0 for x in group)
        before += len(group)
    chances = _chances(tuple(ranks))
    return float(chances[: positive + 1].sum()), float(chances[positive:].sum())


@cache
def _chances(ranks: tuple[int, ...]) -> Array:
    """Return the chance of each sum of ranks, 0 to that of all, when each rank counts or not by a coin."""
    chances = np.ones(1)
    for rank in ranks:
        wider = np.zeros(len(chances) + rank)
        wider[: len(chances)] += chances / 2
        wider[rank:] += chances / 2
        chances = wider
    return chances


@cache
def largest_rejected(runs: int, level: float) -> int:
    """Return the largest sum of ranks 1 to ``runs`` whose lower tail is at most ``level``; -1 without one."""
    tails = np.cumsum(_chances(tuple(range(1, runs + 1))))
    return int(np.sum(tails <= level)) - 1


class Redrawn:
    """Draws from differences that are moved to a centre of 0: what signed ranks claim falsely, and find.

    A sum of the ranks of negative numbers is the number of means of pairs below 0, so it falls as all numbers
    rise by a shift. Numpy's default generator, seeded with 0, draws the seeds and then the noise that breaks
    ties.

    Args:
        d: Differences, any number of them.
        runs: Seeds of a draw.
        draws: Number of draws.
    """

    def __init__(self, d: Array, runs: int, draws: int) -> None:
        rng = np.random.default_rng(0)
        self._drawn = rng.choice(d - hodges_lehmann(d), (draws, runs))
        self._apart = self._drawn + rng.normal(0, TIE / 2, self._drawn.shape)
        self._runs, self._pairs = runs, np.tril_indices(runs)
        self._sums: dict[float, tuple[Array, Array]] = {}

    def false(self, tests: int) -> tuple[float, float]:
        """Return the rates of claims that the centre is above, and below, 0, at the level of Holm's
        correction for the smallest p of ``tests`` tests."""
        most = largest_rejected(self._runs, LEVEL / tests / 2)
        negative, positive = self._ranks(0.0)
        rates = []
        for claimed, sign in ((negative <= most, 1), (positive <= most, -1)):
            i, j = self._pairs
            drawn = self._drawn[claimed]
            centres = np.median((drawn[:, i] + drawn[:, j]) / 2, axis=1)
            rates.append(float(np.sum(sign * centres > TIE) / len(claimed)))
        return rates[0], rates[1]

    def equal(self, tests: int, margin: float) -> float:
        """Return the rate of claims that the centre is within the margin, of differences that lie at it."""
        most = largest_rejected(self._runs, LEVEL / max(1, tests // 2))
        below, above = self._ranks(0.0)[1] <= most, self._ranks(2 * margin)[0] <= most
        return float(np.mean(below & above))

    def found(self, tests: int) -> float:
        """Return the smallest shift of 0, .005, ... .3 that is found with power .8, or NaN."""
        most = largest_rejected(self._runs, LEVEL / tests / 2)
        low, high = 0, 61
        while low < high:
            middle = (low + high) // 2
            enough = np.mean(self._ranks(middle * 0.005)[0] <= most) >= POWER
            low, high = (low, middle) if enough else (middle + 1, high)
        return low * 0.005 if low < 61 else math.nan

    def _ranks(self, shift: float) -> tuple[Array, Array]:
        """Return the sums of the ranks of negative and of positive numbers, per draw."""
        if shift not in self._sums:
            x = self._apart + shift
            order = np.argsort(np.abs(x), axis=1)
            positive = np.take_along_axis(x, order, axis=1) > 0
            sums = positive @ np.arange(1.0, self._runs + 1)
            self._sums[shift] = self._runs * (self._runs + 1) / 2 - sums, sums
        return self._sums[shift]


def rates_of_typical(d: Array, tests: int) -> tuple[float, float]:
    """Return the rate of false claims of d's own study, and the smallest shift that it finds."""
    redrawn = Redrawn(d, len(d), 500)
    return sum(redrawn.false(tests)), redrawn.found(tests)


def rates_of_share(p: float, runs: int, tests: int) -> tuple[float, float]:
    """Return Fisher's test's rate of false claims, and the smallest difference of shares that it finds.

    False claims are those if both arms have the share p. The difference is the smallest of .01, .02, ... 1
    found with power .8, or NaN; one arm is half of it above p and the other half below, both moved if needed
    to lie between 0 and 1.
    """
    claims = _claims(runs, tests)

    def chances(share: float) -> Array:
        return np.array([math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(runs + 1)])

    def claimed(percent: int) -> float:
        apart, centre = percent / 100, min(max(p, percent / 200), 1 - percent / 200)
        above, below = min(1.0, centre + apart / 2), max(0.0, centre - apart / 2)
        return float(chances(above) @ claims @ chances(below))

    return claimed(0), next((at / 100 for at in range(1, 101) if claimed(at) >= POWER), math.nan)


@cache
def _claims(runs: int, tests: int) -> Array:
    """Return 1 where Fisher's test claims a difference of two counts, else 0, [runs + 1, runs + 1]."""
    counts = range(runs + 1)
    claims = [[float(fisher(a, b, runs) * tests < LEVEL) for b in counts] for a in counts]
    return np.array(claims)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-corrected p: the i-th smallest (from 0) of m times m - i, never below a smaller one's."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    stepped = np.maximum.accumulate(np.minimum(1.0, factors * np.asarray(p_values)[order]))
    out = np.empty(len(p_values))
    out[order] = stepped
    return [float(value) for value in out]


def student_above(t: float, freedom: int) -> float:
    """Return P(T > t) of Student's t, by the finite sums for integer degrees of freedom (Abramowitz and
    Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 - inside) / 2 if t > 0 else (1 + inside) / 2


def equivalence(d: Array, margin: float) -> float:
    """Return the larger p of two one-sided t tests that the mean of d is above -margin and below margin."""
    if np.ptp(d) == 0:
        return float(abs(d[0]) >= margin)
    error = d.std(ddof=1) / math.sqrt(len(d))
    return max(student_above((margin - sign * d.mean()) / error, len(d) - 1) for sign in (-1, 1))


@cache
def detectable(seeds: int, level: float) -> float:
    """Return the smallest true mean that a two-sided paired t test finds with power .8.

    Its unit is the standard deviation of the differences. The power is P((Z + shift) / S > bound), Z normal,
    S^2 a chi-squared over its degrees of freedom.
    """
    freedom = seeds - 1
    bound = _root(lambda t: level / 2 - student_above(t, freedom))
    s = np.linspace(1e-6, 3, 6001)
    weight = np.exp((freedom - 1) * np.log(s) - freedom * s**2 / 2 + freedom / 2)
    weight /= weight.sum()
    phi = np.vectorize(NORMAL.cdf)
    shift = _root(lambda shift: float(weight @ phi(shift - bound * s)) - POWER)
    return shift / math.sqrt(seeds)


def _root(rising: Callable[[float], float]) -> float:
    """Return the zero of an increasing function between 0 and 60, by bisection."""
    low, high = 0.0, 60.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
