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
"""Sizes of differences that are no farther apart than this share their rank, or are 0: results have six
digits."""

NORMAL = NormalDist()


@cache
def times(seeds: int, resamples: int) -> Array:
    """How often each resample holds each seed, [R, N], by numpy's default generator from 0."""
    drawn = np.random.default_rng(0).integers(seeds, size=(resamples, seeds))
    flat = np.bincount((drawn + seeds * np.arange(resamples)[:, None]).ravel(), minlength=seeds * resamples)
    return flat.reshape(resamples, seeds).astype(np.float64)


def bca(d: Array, resamples: int = 10_000) -> tuple[float, float]:
    """Efron's bias-corrected and accelerated interval of the mean of d, 95 %."""
    if np.ptp(d) == 0:
        return float(d[0]), float(d[0])
    means = times(len(d), resamples) @ d / len(d)
    return _corrected(means, d.mean(), (d.sum() - d) / (len(d) - 1))


def bca_ratio(part: Array, whole: Array, resamples: int = 10_000) -> tuple[float, float]:
    """The same of the mean of part [N] by that of whole [N]; seeds are drawn in pairs."""
    drawn = times(len(part), resamples)
    left_out = (part.sum() - part) / (whole.sum() - whole)
    return _corrected((drawn @ part) / (drawn @ whole), part.sum() / whole.sum(), left_out)


def _corrected(resampled: Array, found: float, left_out: Array) -> tuple[float, float]:
    """BCa interval of a statistic, from what it is of each resample [R] and without each seed [N]."""
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
    """Percentile interval of the mean of values [N], 95 %."""
    low, high = np.quantile(times(len(values), resamples) @ values / len(values), [0.025, 0.975])
    return float(low), float(high)


def hodges_lehmann(d: Array) -> float:
    """Median of the means of all pairs, each seed with itself too."""
    return float(np.median([(d[i] + d[j]) / 2 for i in range(len(d)) for j in range(i, len(d))]))


def centre_interval(d: Array) -> tuple[float, float]:
    """Interval of that centre, 95 % at least: the means of pairs in order, less as many at each end as there
    are smallest sums of ranks that together have a chance of .025 at most."""
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
    """One-sided p of the signed-rank test that the centre is above 0."""
    return _tails(d)[1]


def fisher(first: int, second: int, runs: int) -> float:
    """Two-sided p of Fisher's exact test of two counts of equally many runs: the chance of all tables with
    the same margins that are no likelier than this one."""
    total = first + second
    tables = {
        k: math.comb(runs, k) * math.comb(runs, total - k)
        for k in range(max(0, total - runs), min(runs, total) + 1)
    }
    return sum(w for w in tables.values() if w <= tables[first]) / math.comb(2 * runs, total)


def newcombe(first: int, second: int, runs: int) -> tuple[float, float]:
    """Newcombe's interval (1998, method 11) of the difference of two shares, from Wilson's with continuity
    correction."""
    (p, low_p, high_p), (q, low_q, high_q) = (_wilson(count, runs) for count in (first, second))
    return p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q)


def _wilson(count: int, runs: int) -> tuple[float, float, float]:
    """A share with Wilson's interval, continuity corrected (Newcombe 1998, one share, method 4)."""
    p, z = count / runs, NORMAL.inv_cdf(1 - LEVEL / 2)
    ends = [0.0, 1.0]
    for side, sign in enumerate((-1, 1)):
        if count != (0, runs)[side]:
            inside = z * z + sign * 2 - 1 / runs + 4 * p * (runs * (1 - p) - sign)
            ends[side] = (2 * runs * p + z * z + sign * (1 + z * math.sqrt(inside))) / (2 * (runs + z * z))
    return p, ends[0], ends[1]


def signed_ranks(d: Array) -> float:
    """Two-sided p of Wilcoxon's signed-rank test of d: twice the share of the 2^N choices of signs whose sum
    of ranks is as far out."""
    return min(1.0, 2 * min(_tails(d)))


def _tails(d: Array) -> tuple[float, float]:
    """Chance of a sum of ranks as low as that of d, and as high, counted in whole numbers over twice the
    midranks."""
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
    """How often the signed-rank test claims a centre that is not there, of draws from d moved to a centre of
    0, at the level that Holm's correction leaves to the smallest of so many p; and the smallest shift, of
    0, .005, ... .3, that it finds with power .8, or NaN. Draws are of numpy's default generator from 0: which
    seeds, and then what breaks ties."""
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
        """Which rows have sums of ranks of negative, and of positive, numbers that are rejected."""
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
    """How often Fisher's test claims a difference where both arms have the mean share of two counts, and the
    smallest difference of .01, .02, ... 1 that it finds with power .8, or NaN: of arms half of it below and
    half above that mean, moved as far as both need to lie between 0 and 1."""
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
    """Whether Fisher's test claims a difference of two counts, [runs + 1, runs + 1]."""
    counts = range(runs + 1)
    claims = [[float(fisher(a, b, runs) * tests < LEVEL) for b in counts] for a in counts]
    return np.array(claims)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the i-th smallest of m times m - i, never below a smaller one's."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    stepped = np.maximum.accumulate(np.minimum(1.0, factors * np.asarray(p_values)[order]))
    out = np.empty(len(p_values))
    out[order] = stepped
    return [float(value) for value in out]


def student_above(t: float, freedom: int) -> float:
    """P(T > t) of Student's t, by the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3
    and 26.7.4)."""
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
    """Larger p of the two one-sided t tests that the mean of d is above -margin and below margin."""
    if np.ptp(d) == 0:
        return float(abs(d[0]) >= margin)
    error = d.std(ddof=1) / math.sqrt(len(d))
    return max(student_above((margin - sign * d.mean()) / error, len(d) - 1) for sign in (-1, 1))


@cache
def detectable(seeds: int, level: float, power: float = 0.8) -> float:
    """Smallest true mean, in standard deviations of the differences, that a two-sided paired t test finds
    with this power: P((Z + shift) / S > bound), Z normal, S^2 a chi-squared over its degrees of freedom."""
    freedom = seeds - 1
    bound = _root(lambda t: level / 2 - student_above(t, freedom))
    s = np.linspace(1e-6, 3, 6001)
    weight = np.exp((freedom - 1) * np.log(s) - freedom * s**2 / 2 + freedom / 2)
    weight /= weight.sum()
    phi = np.vectorize(NORMAL.cdf)
    shift = _root(lambda shift: float(weight @ phi(shift - bound * s)) - power)
    return shift / math.sqrt(seeds)


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function crosses 0, between 0 and 60."""
    low, high = 0.0, 60.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
