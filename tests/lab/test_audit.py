"""The audit: other code finds what the pages say, and sees a page or a raw file that was changed."""

import ast
import copy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from lab.audit import command, raw, tables
from lab.audit import statistics as st
from lab.audit.cells import Cell
from lab.audit.command import ROOT, cells
from lab.audit.others import NOT_OF_RUNS
from lab.study import statistics
from lab.study.endpoints import newcombe
from lab.study.results import read_results
from lab.writers.endpoint_verdicts import verdicts


def differing(page: str) -> list[str]:
    return [c.where for c in cells(page) if isinstance(c, Cell) and c.published != c.found]


def test_a_changed_number_of_a_distillation_differs():
    page = (ROOT / "docs/training.md").read_text()
    for published, changed in (
        ("105 % (87 to 113)<!--", "105 % (87 to 114)<!--"),
        ("0.64 (0.57", "0.64 (0.58"),
    ):
        assert published in page
        page = page.replace(published, changed, 1)
    where = ["distilled-adapter: first step, taught over RL: ", "distilled-share-wp12"]
    assert sorted(differing(page)) == where


@pytest.fixture
def fresh():
    """Nothing is remembered of raw files, before and after."""
    for cached in (raw.read, raw.study, raw.probe):
        cached.cache_clear()
    yield
    for cached in (raw.read, raw.study, raw.probe):
        cached.cache_clear()


def test_the_pages_say_what_the_raw_files_say(capsys):
    assert command.main([]) == 0
    assert "0 differ." in capsys.readouterr().out


def test_it_knows_no_other_code_of_the_laboratory():
    allowed = {*sys.stdlib_module_names, "numpy", "lab.audit"}
    for file in Path(command.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {".".join(n.split(".")[:2]) if n.startswith("lab") else n.split(".")[0] for n in names}
            assert roots <= allowed, file


CHANGES = {
    "-0.028 (-0.055 to -0.014), 32 seeds": "-0.029 (-0.055 to -0.014), 32 seeds",
    "(-0.065 to -0.019), 32 seeds: **harms**": "(-0.065 to -0.018), 32 seeds: **harms**",
    "-0.001 (-0.018 to +0.017), 32 seeds: **undecided**": "-0.001 (-0.018 to +0.017), 32 seeds: **helps**",
    "+0.086 (+0.067 to +0.105): **helps**": "+0.086 (+0.067 to +0.105): **harms**",
    "-0.031 (-0.058 to -0.002)": "-0.030 (-0.058 to -0.002)",
    "16 of 1024<!--": "17 of 1024<!--",
}
"""What stands on docs/method.md, and what somebody made of it."""


def test_a_changed_page_differs():
    page = (ROOT / "docs/method.md").read_text()
    for published, changed in CHANGES.items():
        assert published in page
        page = page.replace(published, changed, 1)
    assert sorted(differing(page)) == [
        "escaped",
        "noise-answers: aqn \N{MINUS SIGN} none, noise-wp12",
        "noise-answers: aqn_uncorrected \N{MINUS SIGN} none_uncorrected, noise-wp12",
        "noise-answers: relative \N{MINUS SIGN} temperature, noise-needle",
        "noise-paper: corrected, wp12, two runs of each seed, at the end",
        "trust-verdicts: `dapo`, ratio to the sampler_stale_4_fast",
    ]


def test_a_changed_raw_value_differs(fresh, monkeypatch):
    whole = copy.deepcopy(raw.read("noise-wp12"))
    run = next(run for run in whole["runs"] if (run["arm"], run["seed"]) == ("aqn", 7))
    run["evaluations"]["accuracy"][-1] -= 0.2
    read = raw.read
    monkeypatch.setattr(raw, "read", lambda name: whole if name == "noise-wp12" else read(name))
    pages = [(ROOT / page).read_text() for page in ("docs/method.md", "docs/noise-results.md")]
    differ = {one.split(":")[0] for page in pages for one in differing(page)}
    assert differ >= {"noise-answers", "noise-paper", "wp12-comparisons"}


def test_a_mark_that_is_neither_recomputed_nor_listed_fails(monkeypatch, tmp_path, capsys):
    """So does one that is listed and that no page has."""
    listed = {
        name: f"<!-- table {name} -->\n<!-- /table -->\n" for names in NOT_OF_RUNS.values() for name in names
    }
    page = tmp_path / "page.md"
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "PAGES", (page.name,))
    for marks, said in (
        (listed, ""),
        (listed | {"number": "<!-- number unheard -->1<!-- / -->"}, "unheard is neither recomputed nor"),
        (
            listed | {"table": "<!-- table unheard-too -->\n<!-- /table -->"},
            "unheard-too is neither recomputed",
        ),
        (listed | {"memory": ""}, "memory is recomputed or on no page"),
    ):
        page.write_text("".join(marks.values()))
        assert command.main([]) == bool(said) and said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "published", "changed", "where"),
    [
        ("noise-results", "+0.008 (+0.002 to +0.014) | 0.84", "+0.008 (+0.002 to +0.015) | 0.84",
         "probe-noise: start-wp12-aqn-0.005, ln mean P of right tokens"),
        ("noise-results", "| logits | 0.02 | -0.066 (-0.131 to -0.001) | | | |\n", "",
         "probe-beside: cells that were measured"),
        ("noise-results", "0.802 to 1.02", "0.812 to 1.02",
         "probe-formats: isotropic, 8 draws, matched, temperature"),
        ("numerics", "0.221 (0.210 to 0.233)", "0.221 (0.211 to 0.233)", "rounding-kl: nvfp4-rtn, KL, wp12"),
        ("studies", "0.099 (0.093 to 0.11) |", "0.099 (0.092 to 0.11) |",
         "testbed-priors: chain, 2, 0.1, samples, bf16"),
        ("studies", "| 0.026 | 0.155 |", "| 0.026 | 0.156 |",
         "endpoint-rates: typical seed: helps, falsely, largest"),
        ("studies", "| 0.002 | | 0.74 apart |", "| 0.002 | | 0.75 apart |",
         "endpoint-rates-12: share of runs, mean 50%: more or fewer, falsely; found in 80%, of which"),
        ("studies", "| 40 | 0.047 | 0.000 |", "| 40 | 0.046 | 0.000 |",
         "verdict-rates: 6 % collapse, the others gain, helps"),
        ("studies", ">0.037<", ">0.036<", "endpoint-helps-words"),
        ("method", "3, 7 and 16 of 32<!--", "3, 8 and 16 of 32<!--", "fell-ranks"),
        ("method", "| .273 |", "| .274 |", "learning: noise, learning rate 5e-4, seed 1"),
        ("serve", "0.604 to 0.650", "0.604 to 0.651",
         "serve-learning: GPU no 0.0003, last 4"),
    ],
)  # fmt: skip
def test_a_changed_figure_differs(page, published, changed, where):
    text = (ROOT / f"docs/{page}.md").read_text()
    assert published in text
    assert differing(text.replace(published, changed, 1)) == [where]


def draws() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    skewed = np.where(rng.random(32) < 0.1, -0.2, 0.01) + rng.normal(0, 0.02, 32)
    tied = np.round(rng.normal(0.01, 0.03, 32), 2)
    return [rng.normal(0.01, 0.03, 32), skewed, tied, rng.normal(0, 1, 16), np.full(5, 0.25)]


@pytest.mark.parametrize("d", draws())
def test_formulas_agree_with_the_laboratory_and_with_scipy(d):
    assert st.bca(d) == pytest.approx(statistics.bca(d), abs=1e-12)
    assert st.signed_ranks(d) == pytest.approx(statistics.wilcoxon(d), rel=1e-9)
    assert st.equivalence(d, 0.02) == pytest.approx(statistics.equivalence(d, 0.02), abs=1e-12)
    size, level = len(d), 0.05 / 40
    assert st.detectable(size, level) == pytest.approx(statistics.detectable(1.0, size, level), rel=1e-4)
    low, high = statistics.mean_interval(d[:, None])
    assert st.percentile(d) == pytest.approx((low[0], high[0]), abs=1e-12)


def test_ranks_and_centre_without_ties_are_scipy_s():
    d = draws()[0]
    assert st.signed_ranks(d) == pytest.approx(stats.wilcoxon(d, method="exact").pvalue, rel=1e-9)
    walsh = [(a + b) / 2 for i, a in enumerate(d) for b in d[i:]]
    assert st.hodges_lehmann(d) == np.median(walsh)


@pytest.mark.parametrize("freedom", [1, 2, 3, 6, 31, 32])
@pytest.mark.parametrize("t", [-2.5, 0.0, 0.3, 4.0])
def test_student_s_tail(t, freedom):
    assert st.student_above(t, freedom) == pytest.approx(stats.t.sf(t, freedom), abs=1e-13)


def test_the_interval_of_a_ratio_is_the_laboratory_s():
    draw = np.random.default_rng(3)
    part, whole = draw.normal(0.1, 0.05, 20), draw.normal(0.3, 0.05, 20)  # no resample is all of them
    assert st.bca_ratio(part, whole) == pytest.approx(statistics.bca_ratio(part, whole), abs=1e-9)


def test_holm():
    p = [0.01, 0.04, 0.03, 0.005, 0.9]
    assert st.holm(p) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.9])
    assert st.holm(p) == pytest.approx(statistics.holm(p))


def test_two_endpoints_are_those_of_the_laboratory(fresh, monkeypatch):
    """Of a study that has run: its collapses, and its escapes as a study of word problems counts them."""
    plain, said = read_results(raw.RESULTS / "noise-wp12.json.gz"), set()
    for changes in ({}, {"escape_above": 0.1, "escape_key": "accuracy/steps_2"}):
        results = replace(plain, study=replace(plain.study, **changes))
        whole = raw.read("noise-wp12") | {"study": raw.read("noise-wp12")["study"] | changes}
        monkeypatch.setattr(tables, "study", lambda name, whole=whole: raw.Study(whole))
        text = verdicts(results, "File: noise-wp12.json.gz.")
        found = [
            c for c in cells(f"<!-- table x-endpoints -->\n{text}<!-- /table -->") if isinstance(c, Cell)
        ]
        assert len(found) == 1 + 9 * 40 and not [c for c in found if c.published != c.found]
        said |= {c.found for c in found}
    assert said >= {"helps", "harms", "undecided", "more", "no effect beyond \N{PLUS-MINUS SIGN}.02"}


@pytest.mark.parametrize(
    ("first", "second", "runs"), [(0, 0, 8), (6, 1, 8), (5, 0, 32), (31, 32, 32), (16, 3, 64)]
)
def test_tests_of_shares_are_the_laboratory_s_and_scipy_s(first, second, runs):
    table = [[first, runs - first], [second, runs - second]]
    assert st.fisher(first, second, runs) == pytest.approx(stats.fisher_exact(table).pvalue, rel=1e-9)
    assert st.newcombe(first, second, runs) == pytest.approx(newcombe(first, second, runs), abs=1e-6)


@pytest.mark.parametrize("seeds", [4, 8, 32])
def test_the_centre_s_interval_is_the_laboratory_s(seeds):
    d = np.random.default_rng(seeds).normal(0.1, 1, seeds)
    assert st.centre_interval(d) == pytest.approx(statistics.hodges_lehmann_interval(d), abs=1e-12)
    assert st.ranks_above(d) == pytest.approx(statistics.signed_rank_above(d), rel=1e-9)
