"""The page and the figures of a study, drawn from results alone."""

import re
import xml.dom.minidom

import numpy as np
import pytest
from rich.console import Console

from lab.study import page
from lab.study.endpoints import endpoints, fisher
from lab.study.error_rates import of_endpoint
from lab.study.results import Results
from lab.study.runner import Runner
from lab.study.statistics import compare
from lab.study.store import Store
from qerl.errors import QeRLError
from qerl.report.runs import number
from tests.support.study import FakeMake, tiny_study


def computed(folder, **fields) -> Results:
    store = Store(folder, tiny_study(**fields))
    assert Runner(store, FakeMake(), Console(quiet=True)).run()
    return store.results()


def test_the_page_shows_every_arm_and_rate_and_needs_no_network(tmp_path):
    pytest.importorskip("scipy")
    results = computed(tmp_path, test_seeds=[0, 1, 666])
    page.write_page(results, tmp_path / "study.html")
    text = (tmp_path / "study.html").read_text()
    assert "aqn \N{MINUS SIGN} none" in text and "chosen 0.0002" in text
    assert text.count('data-arm="aqn"') == text.count('data-arm="none"') >= 3
    assert 'data-pair="aqn none"' in text
    assert "noise_stages" in text  # in what the arms differ
    for word in ("http://", "https://", "<script", "src="):
        assert word not in text


@pytest.mark.parametrize("escape", [None, 0.48])
def test_the_page_shows_both_endpoints_with_their_error_rates(escape, tmp_path):
    fields = {"learning_rates": [2e-4], "tuning_seeds": 0, "test_seeds": 8, "collapse_below": 0.45}
    results = computed(tmp_path, escape_above=escape, **fields)
    text = page.render(results, [])
    typical, share = endpoints(results)
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in text.split("<tr>")]
    shown = {row[2]: row for row in rows if row[2:3] in (["typical seed"], ["share of runs"])}
    for one, kind in ((typical, "typical seed"), (share, "share of runs")):
        row, rates = shown[kind], of_endpoint(results, one)
        assert row[:2] == ["primary", "aqn \N{MINUS SIGN} none"] and row[3] == one.verdict
        assert row[4] == f"{one.difference:+.4f}" and row[6] == number(one.holm)
        assert row[8] == f"{rates.false:.3f}" and row[10] == "8"
    assert shown["share of runs"][7] == f"{share.counts[0]} and {share.counts[1]}"
    assert ("which is an escape" in text) == (escape is not None) != ("which is a collapse" in text)


def test_of_means_the_page_has_no_verdict(tmp_path):
    pytest.importorskip("scipy")
    results = computed(tmp_path, learning_rates=[2e-4], tuning_seeds=0, test_seeds=8)
    (one,) = compare(results)
    assert one.verdict == "helps"
    text = page.render(results, [one])
    means = text[text.index("Means of areas") : text.index("<h2>Arms")]
    assert f"{one.mean:+.4f}" in means and one.verdict not in means and "p," not in means


def test_rates_of_an_endpoint_are_those_of_its_study(tmp_path):
    fields = {"learning_rates": [2e-4], "tuning_seeds": 0, "test_seeds": 8, "collapse_below": 0.45}
    results = computed(tmp_path, **fields)
    _, share = endpoints(results)
    assert share.counts == (0, 8)
    own = of_endpoint(results, share)
    drawn = np.random.default_rng(0).binomial(8, 0.5, (4000, 2))
    claims = [2 * fisher(int(a), int(b), 8) < 0.05 for a, b in drawn]
    assert own.false == pytest.approx(np.mean(claims), abs=0.01)
    first, second = (
        np.random.default_rng(1).binomial(8, 0.5 + half, 4000) for half in (own.found / 2, -own.found / 2)
    )
    power = np.mean([2 * fisher(int(a), int(b), 8) < 0.05 for a, b in zip(first, second, strict=True)])
    assert 0.5 < own.found < 1 and 0.79 < power < 0.85  # one step of .01 in the difference is .02 in power


def test_figures_are_files_that_stand_alone(tmp_path):
    pytest.importorskip("scipy")
    paths = page.write_figures(computed(tmp_path), tmp_path / "figures")
    names = {path.name for path in paths}
    assert {"differences.svg", "accuracy.svg", "rates.svg", "rollout-entropy.svg"} <= names
    for path in paths:
        root = xml.dom.minidom.parse(str(path)).documentElement
        assert root.tagName == "svg" and root.getElementsByTagName("style")


def test_families_have_drawings_of_their_own(tmp_path):
    pytest.importorskip("scipy")
    arms = {"none": None, "aqn": {"noise": True, "noise_stages": 2}, "warm": {"temperature": 1.2}}
    pairs = {"primary": [["aqn", "none"]], "controls": [["warm", "none"]]}
    results = computed(tmp_path, arms=arms, comparisons=pairs)
    names = {path.stem for path in page.write_figures(results, tmp_path / "figures")}
    assert {"accuracy-primary", "accuracy-controls"} <= names
    assert "warm" not in (tmp_path / "figures" / "accuracy-primary.svg").read_text()


def test_a_family_with_one_finished_arm_is_not_drawn(tmp_path):
    pytest.importorskip("scipy")
    arms = {"none": None, "aqn": {"noise": True, "noise_stages": 2}, "warm": {"temperature": 1.2}}
    pairs = {"primary": [["aqn", "none"]], "controls": [["warm", "none"]]}
    results = computed(tmp_path, arms=arms, comparisons=pairs, learning_rates=[1e-4], tuning_seeds=0)
    without_warm = Results(results.study, [run for run in results.runs if run.run.arm.name != "warm"])
    names = {path.stem for path in page.write_figures(without_warm, tmp_path / "figures")}
    assert "accuracy-primary" in names and "accuracy-controls" not in names
    alone = Results(results.study, results.of("none"))
    assert "accuracy-primary" in {path.stem for path in page.write_figures(alone, tmp_path / "alone")}


@pytest.mark.slow
def test_curves_of_a_drawing_differ_however_many_arms_a_study_has(tmp_path):
    pytest.importorskip("scipy")
    arms = {f"arm_{index}": None for index in range(30)}
    pairs = {"ends": [["arm_29", "arm_0"], ["arm_24", "arm_0"]], "others": [["arm_8", "arm_16"]]}
    results = computed(tmp_path, arms=arms, comparisons=pairs, learning_rates=[1e-4], tuning_seeds=0)
    page.write_figures(results, tmp_path / "figures", without=("rollout/entropy",))
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert {"accuracy-ends", "accuracy-others"} <= names and "rollout-entropy-ends" not in names
    drawn = (tmp_path / "figures" / "accuracy-ends.svg").read_text()
    styles = re.findall(r'<g class="(s\d d\d)" data-arm="(arm_\d+)"', drawn)
    assert [arm for _, arm in styles] == ["arm_0", "arm_24", "arm_29"]
    assert len({style for style, _ in styles}) == 3


def test_arms_with_grids_of_their_own_are_drawn_by_rate(tmp_path):
    pytest.importorskip("scipy")
    arms = {"none": None, "full": {"tuning": "full", "weights": "bf16", "learning_rates": [1e-5, 1e-4, 4e-5]}}
    fields = {"arms": arms, "comparisons": {"tuning": [["none", "full"]]}, "learning_rates": [1e-4, 2e-4]}
    results = computed(tmp_path, **fields)
    assert page._all_rates(results.study) == [1e-5, 4e-5, 1e-4, 2e-4]
    none, full = page._by_rate(results)
    assert (none.label, none.at) == ("none", [2, 3]) and (full.label, full.at) == ("full", [0, 1, 2])
    seeds = results.study.tuning_seeds
    means = [np.mean([run.area for run in results.of("full", rate, seeds)]) for rate in (1e-5, 4e-5, 1e-4)]
    assert full.mean == pytest.approx(means)
    page.write_figures(results, tmp_path / "figures")
    drawn = (tmp_path / "figures" / "rates.svg").read_text()
    assert all(f">{rate}<" in drawn for rate in ("1e-05", "4e-05", "0.0001", "0.0002"))


def test_a_sweep_is_drawn_by_rate_and_needs_no_scipy(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.study.statistics.has_module", lambda name: False)
    results = computed(tmp_path, tuning_seeds=0, comparisons={}, arms={"run": None})
    page.write_page(results, tmp_path / "study.html")
    text = (tmp_path / "study.html").read_text()
    assert "0.0001 (3 seeds)" in text and "Verdicts" not in text and "Means of areas" not in text


def test_samples_with_and_without_noise_are_drawn_side_by_side(tmp_path):
    results = computed(tmp_path, comparisons={})
    for run in results.tested("aqn"):
        run.steps.update(noisy=[0.1, 0.2, 0.3, 0.4], clean=[0.2, 0.2, 0.2, 0.2])
    paths = {path.stem: path.read_text() for path in page.write_figures(results, tmp_path / "figures")}
    assert {name for name in paths if name.startswith("found")} == {"found-aqn"}
    assert "noisy samples (3 seeds)" in paths["found-aqn"] and "clean samples" in paths["found-aqn"]


def test_what_is_rounding_alone_is_not_drawn(tmp_path):
    results = computed(tmp_path, comparisons={})
    for value, drawn in ((1e-12, False), (1e-3, True)):
        for run in results.runs:
            run.steps["sampling/kl"] = [0.0, 0.0, value, 0.0]
        page.write_page(results, tmp_path / "study.html")
        assert ("KL of sampler and trainer" in (tmp_path / "study.html").read_text()) == drawn


def test_a_study_under_way_has_a_page(tmp_path):
    results = computed(tmp_path, comparisons={})
    half = Results(results.study, results.runs[:3])
    page.write_page(half, tmp_path / "study.html")
    assert "3 finished runs" in (tmp_path / "study.html").read_text()


def test_what_the_disk_refuses_is_said(tmp_path):
    results = computed(tmp_path / "x", comparisons={})
    (tmp_path / "file").write_text("")
    with pytest.raises(QeRLError, match="cannot be written"):
        page.write_page(results, tmp_path / "file" / "study.html")
    with pytest.raises(QeRLError, match="cannot be written"):
        page.write_figures(results, tmp_path / "file" / "figures")
