"""Intervals of accuracies: published values, and coverage by simulation."""

from statistics import fmean

import numpy as np
import pytest

from qerl.eval.interval import Z95, accuracy_interval, effective_trials, score_interval


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    [(81, 263, 0.2535, 0.3682), (15, 148, 0.0598, 0.1644), (0, 20, 0.0, 0.2005), (1, 29, 0.0018, 0.1963)],
)
def test_score_interval_against_newcombe_1998_table_i(right, trials, low, high):
    assert score_interval(right / trials, trials) == pytest.approx((low, high), abs=1e-4)
    mirrored = score_interval(1 - right / trials, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-4)


def test_samples_of_a_problem_count_between_one_and_all():
    assert effective_trials([0] * 30, 16) == 30, "all wrong says nothing of how problems differ"
    assert accuracy_interval([0] * 30, 16)[1] > 0.1
    assert effective_trials([4, 0, 4, 0] * 10, 4) == 40, "all or nothing: a problem is one trial"
    assert 100 < effective_trials([2, 2, 1, 3] * 10, 4) <= 160, "problems alike: a sample is one trial"
    assert effective_trials([3], 4) == 1


def coverage(interval, problems, samples, mean, spread, seed, trials=250):
    """Share of simulated evaluations whose interval holds the true accuracy."""
    rng = np.random.default_rng(seed)
    size = (trials, problems)
    difficulty = rng.beta(mean * spread, (1 - mean) * spread, size) if spread else np.full(size, mean)
    counts = rng.binomial(samples, difficulty).tolist()
    bounds = [interval(row, samples) for row in counts]
    return fmean(low <= mean <= high for low, high in bounds)


def normal_interval(counts, samples):
    shares = np.array(counts) / samples
    half = Z95 * shares.std(ddof=1) / len(shares) ** 0.5
    return shares.mean() - half, shares.mean() + half


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("problems", [10, 30, 200])
def test_intervals_cover(problems, samples):
    """Beta difficulties: a small spread is all or nothing, 0 stands for problems that are alike."""
    cells = [
        (mean, spread)
        for mean in (0.02, 0.05, 0.5, 0.9, 0.98)
        for spread in ((0,) if samples == 1 else (0.05, 1, 10, 0))
    ]
    shares = [
        coverage(accuracy_interval, problems, samples, *cell, seed=i, trials=120)
        for i, cell in enumerate(cells)
    ]
    assert min(shares) >= 0.88, "95 % less three standard errors of 120 trials"
    assert fmean(shares) >= 0.945


def test_the_simulation_finds_an_interval_that_does_not_cover():
    assert coverage(normal_interval, 30, 16, 0.05, 1, seed=0) < 0.9
