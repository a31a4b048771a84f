"""Paired comparisons of two arms, seed by seed: intervals, tests, verdicts, and what they do not claim.

Arms share their seeds (same data, same fresh adapter, same uniforms), so the outcome is the paired difference
first - second of the area under the curve of accuracy (`RunResult.area`) on the test seeds. A comparison has:

- the mean difference, with the bias-corrected and accelerated (BCa) bootstrap interval of 95 % over seeds;
- Wilcoxon's signed-rank test, because the differences have heavy tails, with the exact distribution of its
  midranks, its p value corrected over all comparisons of the study by Holm's method;
- two one-sided t tests against +- the study's `equivalence`, their p value corrected in the same way: only
  these tests support a claim of no effect, which a large p value never does, and uncorrected, one in twenty
  of many pairs that differ by the margin would pass;
- the smallest true difference that this many seeds would have found with power .8: the paired t test at the
  level that Holm's method gives to the smallest p value of the study;
- the number of collapsed runs of each arm.

The verdict is a word made of the corrected p value, the sign of the mean and the test of equivalence, all at
a level of .05. Only studies that were planned with it report it (docs/method.md); a study's page has the
verdicts of `lab.study.endpoints`. An effect is a claim about the mean, which Wilcoxon's test does not test,
so the interval of the mean must exclude 0 too, and the centre of ranks, which for skewed differences may lie
on the other side of 0, must have the sign of the mean; otherwise no effect is claimed. If no two arms that a
study compares differ, the study claims no effect with probability .95, and likewise no equivalence that does
not hold. If two arms differ and the means of their areas do not, because one is a little better and collapses
now and then, an effect may be claimed more often than that: seeds without a collapse cannot show one.
docs/studies.md has the rates.

Given up: each interval is for one comparison, and all results are for the study's own held-out problems and
the learning rates that were chosen.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.study.results import ROLLOUT_ENTROPY, SIGMA, Results, RunResult
from qerl.errors import QeRLError
from qerl.kernels.needs import has_module, how_to_install

LEVEL = 0.05
POWER = 0.8
RESAMPLES = 10_000
FEWEST = 2
"""Seeds that a comparison needs at least."""

TIE = 2e-6
"""Differences of areas that are no farther apart count as equal: results are kept to six digits, and areas
over a few hundred problems differ by a hundred times as much or not at all."""


@dataclass(frozen=True)
class Comparison:
    """Two arms, paired by seed.

    Attributes:
        family: Group of comparisons in which this one is shown.
        first, second: Names of the arms.
        seeds: Number of seeds that both have finished.
        mean: Mean of the differences first - second in area under the curve.
        sd: Their standard deviation.
        interval: BCa interval of the mean, 95 %.
        p: p value of Wilcoxon's test.
        holm: The same, corrected over the study.
        p_equivalent: p value of the test that the mean is within +- the study's `equivalence`, corrected over
            the study.
        equivalence: The study's `equivalence`.
        detectable: Smallest mean that would have been found with power .8.
        collapses: Runs of the first and of the second arm that collapsed.
        differences: Differences by seed.
        apart: If one arm of the pair has noise, the number of seeds in which the two differ before the noise
            begins, so that their difference is not the noise's alone.
    """

    family: str
    first: str
    second: str
    seeds: int
    mean: float
    sd: float
    interval: tuple[float, float]
    p: float
    holm: float
    p_equivalent: float
    equivalence: float
    detectable: float
    collapses: tuple[int, int]
    differences: tuple[float, ...]
    apart: int

    @property
    def verdict(self) -> str:
        """The claim: `helps` or `harms`, with `, by less than .02` if equivalent; `no effect beyond +-.02`;
        or `undecided`."""
        margin = f"{self.equivalence:g}".removeprefix("0")
        equivalent = self.p_equivalent < LEVEL
        low, high = self.interval
        agree = low * high > 0 and self.mean * hodges_lehmann(np.array(self.differences)) > 0
        if self.holm < LEVEL and agree:
            word = "helps" if self.mean > 0 else "harms"
            return f"{word}, by less than {margin}" if equivalent else word
        return f"no effect beyond \N{PLUS-MINUS SIGN}{margin}" if equivalent else "undecided"


def hodges_lehmann(d: np.ndarray) -> float:
    """Median of all pairs' means, each seed with itself too: the centre that Wilcoxon's test tests."""
    return float(np.median(_means_of_pairs(d)))


def _means_of_pairs(d: np.ndarray) -> np.ndarray:
    i, j = np.triu_indices(len(d))
    return np.asarray((d[i] + d[j]) / 2)


def hodges_lehmann_interval(d: np.ndarray) -> tuple[float, float]:
    """Interval of the centre of d [seeds], of at least 95 %: the centres that the signed-rank test does not
    reject, by its distribution without ties; with five seeds or fewer, which reject none, the range of the
    pairs' means."""
    seeds, chances = len(d), np.ones(1)
    for rank in range(1, seeds + 1):
        chances = (np.append(chances, np.zeros(rank)) + np.append(np.zeros(rank), chances)) / 2
    rejected = int(np.searchsorted(np.cumsum(chances), LEVEL / 2, side="right"))  # sums of ranks 0, 1, ...
    means, at = np.sort(_means_of_pairs(d)), max(0, rejected - 1)
    return float(means[at]), float(means[len(means) - 1 - at])


def compare(results: Results) -> list[Comparison]:
    """All comparisons of a study that have enough finished seeds, families in the study's order.

    Raises:
        QeRLError: scipy is not installed.
    """
    if results.study.comparisons and not has_module("scipy"):
        raise QeRLError(f"The statistics of a study need scipy; run `{how_to_install('scipy')}`.")
    paired = [
        (family, first, second, pairs_of_runs(results, first, second))
        for family, pairs in results.study.comparisons.items()
        for first, second in pairs
    ]
    members = [member for member in paired if len(member[-1]) >= FEWEST]
    margin, each = results.study.equivalence, [differences(rows) for *_, rows in members]
    p_values = [wilcoxon(d) for d in each]
    # A comparison that is planned and not computed yet counts, or looking early would make claims easier.
    not_yet = [1.0] * (len(paired) - len(members))
    adjusted_p = holm([*p_values, *not_yet])
    equivalent_p = holm([*(equivalence(d, margin) for d in each), *not_yet])
    found = []
    for (family, first, second, rows), d, p, adjusted, equivalent in zip(
        members, each, p_values, adjusted_p, equivalent_p, strict=False
    ):
        fell = [(results.collapsed(a), results.collapsed(b)) for a, b in rows]
        found.append(
            Comparison(
                family=family,
                first=first,
                second=second,
                seeds=len(d),
                mean=float(d.mean()),
                sd=float(d.std(ddof=1)),
                interval=bca(d),
                p=p,
                holm=adjusted,
                p_equivalent=equivalent,
                equivalence=margin,
                detectable=detectable(float(d.std(ddof=1)), len(d), LEVEL / len(paired)),
                collapses=(sum(a for a, _ in fell), sum(b for _, b in fell)),
                differences=tuple(map(float, d)),
                apart=sum(_apart(a, b) for a, b in rows),
            )
        )
    return found


def pairs_of_runs(results: Results, first: str, second: str) -> list[tuple[RunResult, RunResult]]:
    """Results of two arms for each test seed that both have finished, in the order of the first."""
    others = {result.run.seed: result for result in results.tested(second)}
    return [(one, others[one.run.seed]) for one in results.tested(first) if one.run.seed in others]


def _apart(one: RunResult, other: RunResult) -> bool:
    """Return True if two runs, one of which has noise, drew from different policies before it began."""
    begins = [
        next((at for at, sigma in enumerate(run.steps.get(SIGMA, [])) if sigma), None) for run in (one, other)
    ]
    clean = [at for at in begins if at is not None]
    if len(clean) != 1:
        return False
    first, second = (run.steps.get(ROLLOUT_ENTROPY, [])[: clean[0]] for run in (one, other))
    return first != second


def differences(rows: Sequence[tuple[RunResult, RunResult]]) -> np.ndarray:
    """Differences [seeds] in area under the curve."""
    return np.array([first.area - second.area for first, second in rows])


def bca(d: np.ndarray) -> tuple[float, float]:
    """95 % BCa interval of the mean of d [seeds]; if all differences are equal, that number twice."""
    from scipy.stats import bootstrap

    if np.ptp(d) == 0:
        return float(d[0]), float(d[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about two or three seeds, which `Comparison.seeds` shows too
        found = bootstrap(
            (d,), np.mean, n_resamples=RESAMPLES, method="BCa", rng=np.random.default_rng(0)
        ).confidence_interval
    return float(found.low), float(found.high)


def bca_ratio(part: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """95 % BCa interval of the mean of part [seeds] divided by that of whole [seeds], resampled in pairs; if
    all seeds have the same ratio, that ratio twice."""
    from scipy.stats import bootstrap

    if np.allclose(part * whole[0], part[0] * whole, rtol=1e-12, atol=0):
        return (float(part[0] / whole[0]),) * 2

    def of_means(part: np.ndarray, whole: np.ndarray, axis: int) -> np.ndarray:
        found: np.ndarray = part.mean(axis=axis) / whole.mean(axis=axis)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `bca`
        found = bootstrap(
            (part, whole), of_means, n_resamples=RESAMPLES, method="BCa", paired=True,
            rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def wilcoxon(d: np.ndarray) -> float:
    """Exact two-sided p value of the signed-rank test on d [seeds]; 1 where all are zero."""
    return min(1.0, 2 * min(signed_rank_above(d), signed_rank_above(-d)))


def signed_rank_above(d: np.ndarray) -> float:
    """Exact p value of the signed-rank test that the centre of d [seeds] is above 0; 1 where all are zero.

    Zeros are left out and equal differences share their mean rank (`TIE`); the distribution is that of these
    ranks with a random sign each, so it is exact with ties too.
    """
    size = np.abs(d)
    by_size = np.argsort(size)
    by_size = by_size[size[by_size] > TIE]
    if not len(by_size):
        return 1.0
    starts = np.flatnonzero(np.diff(size[by_size], prepend=-1.0) > TIE)
    ends = np.append(starts[1:], len(by_size))
    doubled = np.repeat(starts + ends + 1, ends - starts)  # twice the mean of the ranks start + 1, ..., end
    chances = np.ones(1)  # of each sum of the doubled ranks with a positive sign
    for rank in doubled:
        chances = (np.append(chances, np.zeros(rank)) + np.append(np.zeros(rank), chances)) / 2
    positive = int(doubled[d[by_size] > 0].sum())
    return float(min(1.0, chances[positive:].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values of a study, corrected by Holm's step-down method."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def equivalence(d: np.ndarray, margin: float) -> float:
    """p value of the two one-sided t tests that the mean of d [seeds] is within +- margin, uncorrected."""
    from scipy.stats import ttest_1samp

    if np.ptp(d) == 0:
        return 0.0 if abs(d[0]) < margin else 1.0
    above = ttest_1samp(d, -margin, alternative="greater").pvalue
    below = ttest_1samp(d, margin, alternative="less").pvalue
    return float(max(above, below))


def detectable(sd: float, seeds: int, level: float) -> float:
    """Smallest mean difference that a two-sided paired t test finds with power .8.

    Args:
        sd: Standard deviation of the differences.
        seeds: Their number, at least two.
        level: Level of the test.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    if sd == 0:
        return 0.0
    freedom = seeds - 1
    bound = t.ppf(1 - level / 2, freedom)
    standard_errors = brentq(lambda shift: nct.sf(bound, freedom, shift) - POWER, 0, 3 * bound + 5)
    return float(standard_errors * sd / seeds**0.5)


def mean_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap percentile interval (95 %) of the mean over seeds, point by point.

    Args:
        values: [seeds, points].

    Returns:
        Lower and upper bound, each [points]; resamples are the same at all points.
    """
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(values), size=(RESAMPLES // 5, len(values)))
    means = values[drawn].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high
