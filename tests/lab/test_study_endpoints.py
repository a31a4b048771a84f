"""Two endpoints of a comparison: the typical seed and the share of runs, against other formulas and draws."""

from itertools import product
from math import comb

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from lab.study import endpoints as ends
from lab.study.endpoints import endpoints, fisher, newcombe, within
from lab.study.error_rates import of_endpoint
from lab.study.results import Results, write_results
from lab.study.runner import Runner
from lab.study.statistics import hodges_lehmann, hodges_lehmann_interval, holm, signed_rank_above, wilcoxon
from lab.study.store import Store
from lab.writers import endpoint_verdicts
from tests.support.study import FakeMake, tiny_study

ARMS = {"none": None, "aqn": {"noise": True, "noise_stages": 2}, "late": None}
PAIRS = {"primary": [["aqn", "none"]], "other": [["none", "aqn"], ["late", "none"]]}


def studied(tmp_path, **fields) -> Results:
    """A study of eight seeds in which the arm `late` has not run."""
    usual = {"arms": ARMS, "comparisons": PAIRS, "learning_rates": [2e-4], "tuning_seeds": 0, "test_seeds": 8}
    study = tiny_study(**usual, **fields)
    store = Store(tmp_path / "x", study)
    assert Runner(store, FakeMake(), Console(quiet=True)).run()
    return Results(study, [run for run in store.results().runs if run.run.arm.name != "late"])


@pytest.mark.parametrize("seeds", [4, 8, 13])
def test_the_interval_holds_the_centres_that_the_test_does_not_reject(seeds):
    d = np.random.default_rng(seeds).normal(0.3, 1, seeds)
    low, high = hodges_lehmann_interval(d)
    assert low < hodges_lehmann(d) < high
    if seeds > 5:
        inside, outside = (low + 1e-5, high - 1e-5), (low - 1e-5, high + 1e-5)
        assert all(wilcoxon(d - centre) > 0.05 for centre in inside)
        assert all(wilcoxon(d - centre) <= 0.05 for centre in outside)


def test_one_side_of_the_signed_rank_test_counts_all_choices_of_signs():
    d = np.array([0.3, -0.1, 0.5, 0.2, -0.4, 0.6])
    ranks, seen = stats.rankdata(abs(d)), stats.rankdata(abs(d))[d > 0].sum()
    sums = [
        sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        for signs in product((0, 1), repeat=6)
    ]
    assert signed_rank_above(d) == np.mean([one >= seen for one in sums])
    assert within(d, 10.0) < 0.05 < within(d, 0.1)


def test_fisher_s_p_adds_what_is_as_unlikely():
    chances = [comb(8, k) * comb(8, 7 - k) / comb(16, 7) for k in range(8)]
    assert fisher(6, 1, 8) == pytest.approx(sum(c for c in chances if c <= chances[6] * (1 + 1e-9)))
    assert fisher(3, 3, 32) == 1.0


def test_the_interval_of_a_difference_of_shares_covers():
    rng = np.random.default_rng(0)
    for p, q in ((0.05, 0.05), (0.1, 0.4), (0.0, 0.2)):
        drawn = rng.binomial(64, p, 400), rng.binomial(64, q, 400)
        found = [newcombe(a, b, 64) for a, b in zip(*drawn, strict=True)]
        assert np.mean([low <= p - q <= high for low, high in found]) > 0.94
    assert newcombe(3, 1, 32) == pytest.approx(tuple(-x for x in reversed(newcombe(1, 3, 32))))


def test_both_endpoints_share_one_correction_and_what_has_not_run_counts(tmp_path):
    found = endpoints(studied(tmp_path, collapse_below=0.45))
    assert [(one.first, one.second, one.kind) for one in found] == [
        ("aqn", "none", "typical"), ("aqn", "none", "share"),
        ("none", "aqn", "typical"), ("none", "aqn", "share"),
    ]  # fmt: skip
    typical, share, back, _ = found
    assert typical.difference > 0 and typical.verdict == "helps"
    assert back.difference == -typical.difference and back.verdict == "harms"
    assert share.counts == (0, 8) and share.difference == -1 and share.verdict == "fewer"
    assert share.p == pytest.approx(2 / comb(16, 8))
    tests = [typical.p, back.p, share.p, share.p, 1.0, 1.0]
    assert [typical.holm, back.holm, share.holm] == pytest.approx(holm(tests)[:3])


def test_a_study_with_an_escape_counts_those(tmp_path):
    results = studied(tmp_path, escape_above=0.48, collapse_below=0.45)
    counts = next(one.counts for one in endpoints(results) if one.kind == "share")
    expected = [
        sum(run.evaluations["accuracy"][-1] > 0.48 for run in results.tested(arm)) for arm in ("aqn", "none")
    ]
    assert counts == tuple(expected) and counts[0] > counts[1] == 0


def test_equal_arms_have_no_effect_and_no_more_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(ends, "differences", lambda rows: np.zeros(len(rows)))
    typical, share, *_ = endpoints(studied(tmp_path, collapse_below=0.1))
    assert typical.verdict == "no effect beyond \N{PLUS-MINUS SIGN}.02" and typical.p_equivalent < 0.05
    assert typical.p == 1 and share.verdict == "undecided" and share.counts == (0, 0)


def test_the_command_prints_both_endpoints(tmp_path, capsys):
    results = studied(tmp_path, collapse_below=0.45)
    write_results(results, tmp_path / "results.json.gz")
    endpoint_verdicts.main([str(tmp_path / "results.json.gz")])
    first = capsys.readouterr().out.splitlines()[2]
    typical, share, *_ = endpoints(results)
    assert first.startswith(f"| aqn \N{MINUS SIGN} none | {typical.difference:+.3f} (")
    assert f"| 0 and 8 of 8 | -1.000 ({share.interval[0]:+.3f} to {share.interval[1]:+.3f})" in first
    rates = of_endpoint(results, share)
    assert first.endswith(f"| fewer | {rates.false:.3f}; {rates.found:.3f} |") and 0.8 < rates.found <= 1
