"""Statistics of a study against hand-computed and textbook values, and the verdicts made of them."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lab.study import page, statistics
from lab.study.results import Results, RunResult
from qerl.errors import QeRLError
from tests.support.study import tiny_study


def results(first, second, **fields):
    """A study of one pair whose areas are given, seed by seed."""
    study = tiny_study(learning_rates=[1e-4], tuning_seeds=0, test_seeds=len(first), **fields)
    runs = []
    for name, areas in (("aqn", first), ("none", second)):
        for run, area in zip(study.test_runs(study.arms[name], 1e-4), areas, strict=True):
            runs.append(RunResult(run, {}, [0, 4], {"accuracy": [area, area]}))
    return Results(study, runs)


def test_holm():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.9]) == [1.0, 1.0] and statistics.holm([]) == []


def test_the_band_is_that_of_the_mean():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(64, 3))
    low, high = statistics.mean_interval(values)
    half = 1.96 * values.std(axis=0) / 8
    assert np.allclose(high - low, 2 * half, rtol=0.1)
    assert ((low < values.mean(axis=0)) & (values.mean(axis=0) < high)).all()


def test_comparisons_without_scipy_are_refused(monkeypatch):
    monkeypatch.setattr(statistics, "has_module", lambda name: False)
    with pytest.raises(QeRLError, match=r"need scipy; run `pip install 'scipy"):
        statistics.compare(results([0.1, 0.2], [0.1, 0.2]))
    assert statistics.compare(results([0.1], [0.2], comparisons={})) == []


class TestWithScipy:
    @pytest.fixture(autouse=True)
    def _scipy(self):
        pytest.importorskip("scipy")

    def test_wilcoxon_of_six_positive_differences(self):
        assert statistics.wilcoxon(np.arange(1.0, 7)) == pytest.approx(2 / 2**6)
        assert statistics.wilcoxon(np.zeros(5)) == 1.0

    @pytest.mark.parametrize(
        "ranks",
        [
            [1, 2, 3, 4, 5, 6, 7],
            [1, 1, 1, -2, 2, 3, 3, -3],
            [-1, 1, 2, 2, -2, 2, 5],
            [0, 0, -1, 1, 1, 4],
            [2],
        ],
    )
    def test_wilcoxon_is_the_share_of_signs_as_far_out(self, ranks):
        d = np.array(ranks) / 5120 + 1e-7 * np.arange(len(ranks))  # results are kept to six digits
        size = np.array([abs(rank) for rank in ranks if rank])
        mid = (size[:, None] > size).sum(axis=1) + ((size[:, None] == size).sum(axis=1) + 1) / 2
        sums = np.array([mid[np.array(signs)].sum() for signs in product([True, False], repeat=len(mid))])
        seen = mid[[rank > 0 for rank in ranks if rank]].sum()
        share = min(1.0, 2 * min((sums <= seen).mean(), (sums >= seen).mean()))
        assert statistics.wilcoxon(d) == pytest.approx(share, rel=1e-12)

    def test_equivalence_needs_both_sides(self):
        near = np.array([0.001, -0.001, 0.002, -0.002] * 4)
        assert statistics.equivalence(near, 0.02) < 1e-6
        assert statistics.equivalence(near + 0.03, 0.02) > 0.99
        assert statistics.equivalence(near - 0.03, 0.02) > 0.99
        assert statistics.equivalence(np.full(4, 0.01), 0.02) == 0.0
        assert statistics.equivalence(np.full(4, -0.03), 0.02) == 1.0

    def test_bca_leans_to_the_long_tail(self):
        d = np.array([0.0] * 20 + [1.0])
        low, high = statistics.bca(d)
        assert 0 <= low < d.mean() < high
        assert high - d.mean() > d.mean() - low
        assert statistics.bca(np.full(3, 0.5)) == (0.5, 0.5)

    def test_detectable_is_found_with_power_80(self):
        effect = statistics.detectable(1.0, 32, 0.05)
        assert effect == pytest.approx(2.8 / 32**0.5, rel=0.06)  # 1.96 + 0.84 standard errors, for many seeds
        rng = np.random.default_rng(0)
        drawn = rng.normal(effect, 1.0, size=(20_000, 32))
        t = drawn.mean(axis=1) / drawn.std(axis=1, ddof=1) * 32**0.5
        assert (np.abs(t) > 2.0395).mean() == pytest.approx(0.8, abs=0.01)
        assert statistics.detectable(1.0, 32, 0.0125) > effect

    @pytest.mark.parametrize(
        ("shift", "spread", "verdict"),
        [
            (0.05, 0.01, "helps"),
            (-0.05, 0.01, "harms"),
            (0.008, 0.004, "helps, by less than .02"),
            (0.0, 0.01, "no effect beyond \N{PLUS-MINUS SIGN}.02"),
            (0.0, 0.2, "undecided"),
        ],
    )
    def test_verdicts(self, shift, spread, verdict):
        noise = spread * np.tile([1.0, -1.0, 0.5, -0.5], 8)
        (one,) = statistics.compare(results(0.5 + shift + noise, np.full(32, 0.5)))
        assert one.verdict == verdict
        assert one.seeds == 32 and one.mean == pytest.approx(shift, abs=1e-9)
        assert one.interval[0] < one.mean < one.interval[1]

    def test_seeds_are_paired_and_collapses_counted(self):
        found = results([0.6, 0.7, 0.1, 0.2], [0.5, 0.5, 0.5, 0.3])
        del found.runs[-4]  # the first seed of the second arm
        (one,) = statistics.compare(found)
        assert one.differences == pytest.approx((0.2, -0.4, -0.1))
        assert one.collapses == (2, 1)
        del found.runs[-2:]
        assert statistics.compare(found) == []  # one seed says nothing

    def test_a_planned_comparison_counts_before_it_is_computed(self):
        noise = 0.01 * np.tile([1.0, -1.0, 0.5, -0.5], 2)
        arms = {"none": None, "aqn": {"noise": True, "noise_stages": 2}, "later": {"lora_r": 8}}
        planned = {"primary": [["aqn", "none"]], "another": [["later", "none"]]}
        (alone,) = statistics.compare(results(0.55 + noise, np.full(8, 0.5)))
        (one,) = statistics.compare(results(0.55 + noise, np.full(8, 0.5), arms=arms, comparisons=planned))
        assert alone.holm == alone.p and one.holm == pytest.approx(2 * one.p)

    def test_no_effect_is_claimed_with_the_correction_of_the_study(self):
        d = 0.02 * np.tile([1.0, -1.0, 0.5, -0.5], 4) + 0.0125
        second = np.full(16, 0.5)
        (alone,) = statistics.compare(results(second + d, second))
        assert alone.p_equivalent == pytest.approx(statistics.equivalence(d, 0.02))
        assert alone.p_equivalent < 0.05 < 2 * alone.p_equivalent
        assert "no effect" in alone.verdict or "by less than" in alone.verdict
        arms = {"none": None, "aqn": {"noise": True, "noise_stages": 2}, "later": {"lora_r": 8}}
        planned = {"primary": [["aqn", "none"]], "another": [["later", "none"]]}
        (one,) = statistics.compare(results(second + d, second, arms=arms, comparisons=planned))
        assert one.p_equivalent == pytest.approx(2 * alone.p_equivalent)
        assert "no effect" not in one.verdict and "by less than" not in one.verdict

    def test_an_arm_that_leaves_its_control_before_the_noise_begins_is_told(self):
        found = results([0.6, 0.7, 0.8], [0.5, 0.5, 0.5])
        for run in found.runs:
            noisy = run.run.arm.noise
            run.steps["noise/sigma"] = [0.0, 0.0, 0.5 * noisy, 0.1 * noisy]
            run.steps["rollout/entropy"] = [1.0, 0.9, 0.8 + noisy, 0.7]
        assert statistics.compare(found)[0].apart == 0
        for run in found.runs[:2]:
            run.steps["rollout/entropy"][1] = 0.91
        (one,) = statistics.compare(found)
        assert one.apart == 2
        words = "in 2 of 3 seeds the two differ before the noise begins"
        assert words in page.render(found, [one]) and words not in page.render(found, [replace(one, apart=0)])
        for run in found.runs:
            run.steps["noise/sigma"] = [0.0] * 4
        assert statistics.compare(found)[0].apart == 0  # formats, say, differ from the first step on

    def test_an_interval_that_holds_0_decides_nothing(self):
        d = np.array([-0.004] * 27 + [0.018] * 5) + 1e-5 * np.arange(32)
        (one,) = statistics.compare(results(0.5 + d, np.full(32, 0.5)))
        low, high = one.interval
        assert one.holm < 0.05 and one.mean < 0 and statistics.hodges_lehmann(d) < 0 and low < 0 < high
        assert one.verdict == "no effect beyond \N{PLUS-MINUS SIGN}.02"

    def test_a_mean_against_the_ranks_decides_nothing(self):
        d = np.array([0.01] * 28 + [-0.4] * 4) + 1e-4 * np.arange(32)
        (one,) = statistics.compare(results(0.5 + d, np.full(32, 0.5)))
        assert one.holm < 0.05 and one.mean < 0 < np.median(one.differences)
        assert one.verdict == "undecided"


def test_a_ratio_of_means_has_the_interval_of_its_numerator_where_the_denominator_is_fixed():
    rng = np.random.default_rng(3)
    part = rng.normal(0.3, 0.1, 8)
    assert statistics.bca_ratio(part, np.full(8, 0.5)) == pytest.approx(
        [bound / 0.5 for bound in statistics.bca(part)]
    )
    low, high = statistics.bca_ratio(part, part * 2)
    assert low == high == pytest.approx(0.5)


def test_seeds_of_a_ratio_are_drawn_in_pairs():
    """Against a percentile bootstrap of pairs; of seeds drawn apart the interval is ten times as wide."""
    rng = np.random.default_rng(4)
    whole = rng.uniform(0.1, 0.3, 8)
    part = 0.5 * whole + rng.normal(0, 0.005, 8)
    drawn = rng.integers(8, size=(20_000, 8))
    ratios = part[drawn].mean(1) / whole[drawn].mean(1)
    assert statistics.bca_ratio(part, whole) == pytest.approx(np.percentile(ratios, [2.5, 97.5]), abs=0.006)
    assert np.ptp(statistics.bca_ratio(part, whole)) < 0.06
