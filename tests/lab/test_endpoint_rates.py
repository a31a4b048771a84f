"""Rates of false claims: the fast tests are those of the laboratory, and equal arms keep the level."""

import numpy as np
import pytest
from scipy.stats import fisher_exact

from lab.study import error_rates
from lab.study.endpoints import within
from lab.study.statistics import wilcoxon
from lab.writers import endpoint_rates as rates


def test_the_fast_test_rejects_what_the_exact_one_rejects():
    x = np.random.default_rng(1).normal(0.25, 1, (200, 20))
    least, most = error_rates.critical(20, 0.025), 210
    sums = error_rates.sums(x)
    fast = (sums <= least) | (sums >= most - least)
    assert fast.tolist() == [wilcoxon(d) < 0.05 for d in x] and 0.05 < fast.mean() < 0.95


def test_symmetric_differences_keep_the_level_and_large_shifts_are_found():
    d = np.array([-1.0, 1.0, -0.5, 0.5, 0.2, -0.2, 0.05, -0.05]) * 0.1
    found = error_rates.typical(d, 32, 1, 2000, rates.MARGIN)
    assert found["helps"] + found["harms"] == pytest.approx(0.05, abs=0.02)
    assert found["equal"] < 0.06 and 0.01 < found["detectable"] < 0.1


def test_arms_that_differ_by_the_margin_are_called_equal_as_often_as_the_test_does():
    d = np.random.default_rng(3).normal(0, 0.03, 40)
    d -= rates.hodges_lehmann(d)
    own = error_rates.typical(d, 24, 1, 400, rates.MARGIN)["equal"]
    draws = np.random.default_rng(4).choice(d, (400, 24)) + rates.MARGIN
    assert own == pytest.approx(np.mean([within(row, rates.MARGIN) < 0.05 for row in draws]), abs=0.04)


def test_where_most_seeds_do_not_differ_nothing_is_claimed():
    d = np.array([0.0] * 34 + [0.05] * 6)
    assert error_rates.typical(d, 32, 1, 500, rates.MARGIN)["helps"] < 0.02


def test_shares_by_summing_are_those_of_drawing():
    found = error_rates.share(0.25, 16, 1)
    counts = np.random.default_rng(0).binomial(16, 0.25, (4000, 2))
    p = [fisher_exact([[a, 16 - a], [b, 16 - b]]).pvalue for a, b in counts]
    assert found["false"] == pytest.approx(np.mean(np.array(p) < 0.05), abs=0.01)
    assert 0.4 < found["found"] < 1 and np.isnan(error_rates.share(0.5, 4, 32)["found"])


@pytest.mark.parametrize(("p", "low"), [(0.1, 0.0), (0.5, None), (0.84375, None), (0.98, None)])
def test_the_smallest_difference_is_looked_for_on_both_sides_of_the_mean(p, low):
    """A fall from a high share is found as a rise from a low one is, with the power that is asked for."""
    found = error_rates.share(p, 64, 30)["found"]
    assert found == pytest.approx(error_rates.share(1 - p, 64, 30)["found"])
    below = min(max(0.0, p - found / 2), 1 - found) if low is None else low
    rng = np.random.default_rng(5)
    pairs = zip(rng.binomial(64, below + found, 2000), rng.binomial(64, below, 2000), strict=True)
    power = np.mean([30 * fisher_exact([[a, 64 - a], [b, 64 - b]]).pvalue < 0.05 for a, b in pairs])
    assert power == pytest.approx(0.8, abs=0.06) and power > 0.77


def test_equivalence_is_corrected_over_comparisons_and_the_other_tests_over_both_endpoints():
    d = np.random.default_rng(6).normal(0, 0.02, 40)
    d -= rates.hodges_lehmann(d)
    draws = np.random.default_rng(7).choice(d, (400, 32)) + rates.MARGIN
    for tests, comparisons in ((1, 1), (2, 1), (8, 4)):
        own = error_rates.typical(d, 32, tests, 2000, rates.MARGIN)["equal"]
        expected = np.mean([within(row, rates.MARGIN) * comparisons < 0.05 for row in draws])
        assert own == pytest.approx(expected, abs=0.03)
    one, two = (error_rates.typical(d, 32, tests, 2000, rates.MARGIN) for tests in (1, 2))
    assert one["equal"] == two["equal"] and two["helps"] + two["harms"] < one["helps"] + one["harms"]


def test_every_planned_comparison_gives_a_shape_with_a_centre_of_0():
    shapes = rates.shapes()
    assert len(shapes) > 80
    assert all(abs(rates.hodges_lehmann(d)) < 1e-9 for d in shapes.values())
