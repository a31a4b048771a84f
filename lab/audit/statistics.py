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

LEVEL = 0.05
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
    ways = [1] + [0] * len(means)
    for rank in range(1, len(d) + 1):
        ways = [way + (ways[at - rank] if at >= rank else 0) for at, way in enumerate(ways)]
    rejected, chance = -1, 0.0
    while chance + ways[rejected + 1] / 2 ** len(d) <= LEVEL / 2:
        rejected += 1
        chance += ways[rejected] / 2 ** len(d)
    cut = max(0, rejected)
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
    (p, low_p, high_p), (q, low_q, high_q) = (_wilson(count, runs) for count in (first, second))
    return p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q)


def _wilson(count: int, runs: int) -> tuple[float, float, float]:
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
    """Return the probabilities of a rank sum at most, and at least, that of d, counted in integers over
    doubled midranks."""
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
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        ways = [way + (ways[at - rank] if at >= rank else 0) for at, way in enumerate(ways)]
    return sum(ways[: positive + 1]) / 2 ** len(ranks), sum(ways[positive:]) / 2 ** len(ranks)


def rates_of_typical(d: Array, tests: int, draws: int = 500) -> tuple[float, float]:
    """Return the signed-rank test's rate of false claims, and the smallest shift that it finds.

    The level is that of Holm's correction for the smallest p of ``tests`` tests. False claims are counted on
    draws from d moved to a centre of 0. The shift is the smallest of 0, .005, ... .3 found with power .8, or
    NaN. Numpy's default generator, seeded with 0, draws the seeds and then the noise that breaks ties.
    """
    rng, runs = np.random.default_rng(0), len(d)
    drawn = rng.choice(d - hodges_lehmann(d), (draws, runs))
    apart = drawn + rng.normal(0, TIE / 2, drawn.shape)
    ways = [1] + [0] * (runs * (runs + 1) // 2)
    for rank in range(1, runs + 1):
        ways = [way + (ways[at - rank] if at >= rank else 0) for at, way in enumerate(ways)]
    most, total = -1, 0
    while (total + ways[most + 1]) / 2**runs <= LEVEL / tests / 2:
        most += 1
        total += ways[most]

    def tails(x: Array) -> tuple[Array, Array]:
        """Return per row if the rank sum of its negative, and of its positive, numbers is rejected."""
        order = np.argsort(np.abs(x), axis=1)
        positive = np.take_along_axis(x, order, axis=1) > 0
        ranks = np.arange(1, runs + 1)
        return (ranks * ~positive).sum(axis=1) <= most, (ranks * positive).sum(axis=1) <= most

    up, down = tails(apart)
    i, j = np.tril_indices(runs)
    centres = np.median((drawn[:, i] + drawn[:, j]) / 2, axis=1)
    false = np.mean(up & (centres > TIE)) + np.mean(down & (centres < -TIE))
    shifts = [step * 0.005 for step in range(61)]
    return float(false), next((s for s in shifts if tails(apart + s)[0].mean() >= 0.8), math.nan)


def rates_of_share(first: int, second: int, runs: int, tests: int) -> tuple[float, float]:
    """Return Fisher's test's rate of false claims, and the smallest difference of shares that it finds.

    False claims are those if both arms have the mean share of the two counts. The difference is the smallest
    of .01, .02, ... 1 found with power .8, or NaN; one arm is half of it above that mean and the other half
    below, both moved if needed to lie between 0 and 1.
    """
    p, claims = (first + second) / (2 * runs), _claims(runs, tests)

    def chances(share: float) -> Array:
        return np.array([math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(runs + 1)])

    def claimed(percent: int) -> float:
        apart, centre = percent / 100, min(max(p, percent / 200), 1 - percent / 200)
        above, below = min(1.0, centre + apart / 2), max(0.0, centre - apart / 2)
        return float(chances(above) @ claims @ chances(below))

    return claimed(0), next((at / 100 for at in range(1, 101) if claimed(at) >= 0.8), math.nan)


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
def detectable(seeds: int, level: float, power: float = 0.8) -> float:
    """Return the smallest true mean that a two-sided paired t test finds with this power.

    Its unit is the standard deviation of the differences. The power is P((Z + shift) / S > bound), Z normal,
    S^2 a chi-squared over its degrees of freedom.
    """
    freedom = seeds - 1
    bound = _root(lambda t: level / 2 - student_above(t, freedom))
    s = np.linspace(1e-6, 3, 6001)
    weight = np.exp((freedom - 1) * np.log(s) - freedom * s**2 / 2 + freedom / 2)
    weight /= weight.sum()
    phi = np.vectorize(NORMAL.cdf)
    shift = _root(lambda shift: float(weight @ phi(shift - bound * s)) - power)
    return shift / math.sqrt(seeds)


def _root(rising: Callable[[float], float]) -> float:
    """Return the zero of an increasing function between 0 and 60, by bisection."""
    low, high = 0.0, 60.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
