"""95 % intervals of an accuracy that keep their coverage for few problems and few right answers, too.

With one sample per problem the answers are n independent trials, and the interval is Wilson's with continuity
correction (Newcombe 1998, method 4), a closed form close to the exact interval of Clopper and Pearson.

With K samples per problem the nK answers are not independent: a hard problem is hard for all of its samples.
They are worth n / r independent trials, where r is the variance of the problems' shares s_1..s_n of right
answers relative to the maximum variance of shares with the same mean p::

    r = var(s) / (p (1 - p))          1/K, no difference between problems, to 1, each all right or all wrong

The estimate of r depends on the problems with a right answer or those with a wrong one, whichever are fewer.
One more problem that is all right or all wrong is therefore added to these a problems, and the same closed
form is used for n / r' trials::

    r' = (a r + 1) / (a + 1),  n <= n / r' <= nK

So 30 problems that are all wrong are 30 trials for any K, and the interval has a positive width even if all
shares are equal. In simulations (`tests/eval/test_interval.py`) with 10 to 200 problems, K of 1, 4 and 16,
accuracies from 2 to 98 % and difficulties from equal to all or nothing, its coverage is at least 94.5 %; that
of a normal interval over problems is 87 % or less. Given up: the interval is up to a fifth wider than needed
if few problems are right or wrong.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance

Z95 = 1.959964


def accuracy_interval(counts: Sequence[int], samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the accuracy over a population of problems.

    Args:
        counts: Number of right samples of each problem, at least one problem.
        samples: Samples per problem (K).
    """
    return score_interval(fmean(counts) / samples, effective_trials(counts, samples))


def pass_interval(counts: Sequence[int], samples: int, k: int) -> tuple[float, float]:
    """Return the 95 % interval of pass@k over a population of problems.

    A problem's share is its probability to be solved within k samples (`pass_at`), and its K samples are
    worth at most K / k trials; the rest is as for the accuracy.

    Args:
        counts: Number of right samples of each problem, at least one problem.
        samples: Samples per problem (K).
        k: 1 (the accuracy's interval) to K.
    """
    shares = [pass_at(samples, count, k) for count in counts]
    return score_interval(fmean(shares), _trials(shares, samples / k))


def effective_trials(counts: Sequence[int], samples: int) -> float:
    """Return the number of independent trials that the samples are worth, from n to n * K."""
    return _trials([count / samples for count in counts], samples)


def _trials(shares: Sequence[float], max_each: float) -> float:
    """Return the number of independent trials that the shares are worth, at most ``max_each`` per problem."""
    problems, mean = len(shares), fmean(shares)
    if max_each == 1 or problems == 1 or not 0 < mean < 1:
        return float(problems)
    part = variance(shares) / (mean * (1 - mean))
    telling = min(sum(share > 0 for share in shares), sum(share < 1 for share in shares))
    part = (telling * part + 1) / (telling + 1)
    return min(max(problems / part, problems), problems * max_each)


def mean_interval(shares: Sequence[float], bounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of independent shares, from their own intervals.

    The distances of the shares to their bounds are added in squares, separately for lower and upper bounds
    (Zou and Donner 2008, a generalisation of Newcombe's interval of a difference), so the result is as
    asymmetric as its parts.

    Args:
        shares: For example a policy's accuracy on each of several tasks.
        bounds: The 95 % interval of each.
    """
    mean, count = fmean(shares), len(shares)
    below = math.hypot(*(share - low for share, (low, _) in zip(shares, bounds, strict=True)))
    above = math.hypot(*(high - share for share, (_, high) in zip(shares, bounds, strict=True)))
    return max(0.0, mean - below / count), min(1.0, mean + above / count)


def score_interval(share: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share with continuity correction; ``trials`` may be fractional.

    A share within half a trial of 0 or 1 counts as 0 or 1: the formula, derived for whole trials, would not
    reach the bound there.
    """
    spread = Z95**2
    centre, scale = 2 * trials * share + spread, 2 * (trials + spread)

    def half(sign: int) -> float:
        inner = spread + sign * 2 - 1 / trials + 4 * share * (trials * (1 - share) - sign)
        return 1 + Z95 * math.sqrt(max(0.0, inner))

    half_a_trial = 0.5 / trials
    low = 0.0 if share <= half_a_trial else max(0.0, (centre - half(-1)) / scale)
    high = 1.0 if share >= 1 - half_a_trial else min(1.0, (centre + half(1)) / scale)
    return low, high


def pass_at(samples: int, right: int, k: int) -> float:
    """Return the probability that at least one of k completions drawn from the K sampled ones is right."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)
