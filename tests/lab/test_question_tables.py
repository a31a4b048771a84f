"""The open questions: every planned family is asked for, and tables fill from results."""

import numpy as np
import pytest

from lab.audit import raw
from lab.audit.cells import Cell
from lab.audit.command import ROOT, cells
from lab.study.arms import Run
from lab.study.library import FOLDER
from lab.study.results import Results, RunResult, by_key, write_results
from lab.study.spec import joined, read_study
from lab.writers import question_tables, study_tables
from lab.writers.tables import render
from qerl.settings.library import read_mapping

PLANS = {
    "matched-testbed-chain": ("matched", "testbed-chain"),
    "matched-testbed-lock": ("matched", "testbed-lock"),
    "matched-words": ("matched", "words"),
    "four-bits": ("wp12", "four-bits"),
    "own-rates": ("wp12", "own-rates"),
    "full": ("wp12", "full"),
    "worked": ("worked", "worked-problems"),
}


def planned(name, **changes):
    """A plan, with the arms whose doses are fitted before it runs."""
    values = {}
    for file in PLANS[name]:
        values = joined(values, read_mapping(FOLDER / f"{file}.yaml", "study"), file)
    for pair in (pair for pairs in values["comparisons"].values() for pair in pairs):
        for arm in pair:
            fitted = {"temperature_stages": [1, 1.1]} if arm.startswith("temperature") else {
                "noise": True, "noise_sigma_stages": [0, 0.01]}  # fmt: skip
            values["arms"].setdefault(arm, fitted)
    return read_study(name, values | changes)


def results_of(study, spread=0.01):
    """Runs whose curves are chance, with a better first family and an arm that always ends well."""
    rng, runs = np.random.default_rng(3), []
    better = {pair[0] for pair in next(iter(study.comparisons.values()))}
    for at, arm in enumerate(study.arms.values()):
        for seed in study.test_seeds:
            level = 0.3 + 0.05 * (arm.name in better) + spread * rng.normal()
            end = 0.9 if at == len(study.arms) - 1 else level + 0.2 * (rng.random() < 0.3)
            curve = np.linspace(0.2, 1, len(study.eval_at)) * level
            curve[-1] = end
            keys = {"accuracy", study.escape_key}
            found = by_key({key: float(value) for key in keys} for value in curve)
            step = {"noise/sigma": 0.0, "rollout/entropy": 1.0, "entropy": 1.0, "sampling/kl": 0.03}
            logged = by_key(step for _ in range(study.steps))
            run = Run(arm, seed, study.rates(arm)[0])
            runs.append(RunResult(run, logged, study.eval_at, found, facts={"device": "x", "commit": "c"}))
    return Results(study, runs)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results that begins empty; nothing is remembered before or after."""
    cached = (raw.read, raw.study, raw.probe, study_tables.study, question_tables.found)
    for one in cached:
        one.cache_clear()
    monkeypatch.setattr(raw, "RESULTS", tmp_path)
    monkeypatch.setattr(study_tables, "RESULTS", tmp_path)
    yield tmp_path
    for one in cached:
        one.cache_clear()


def section():
    """The part of the page that these tables fill, made anew."""
    page = (ROOT / "docs/method.md").read_text()
    return render(page[page.index("### The open questions") : page.index("### How it was measured")])


def differing(page):
    return [cell for cell in cells(page) if isinstance(cell, Cell) and cell.published != cell.found]


@pytest.mark.parametrize("name", PLANS)
def test_every_family_of_a_plan_is_a_question(name):
    asked = [family for _, of, family, _ in question_tables.QUESTIONS if of == name]
    assert asked == list(planned(name).comparisons)


def test_the_studies_are_those_with_a_plan_and_a_table_on_the_page():
    assert set(question_tables.STUDIES) == set(PLANS)
    page = (ROOT / "docs/method.md").read_text()
    assert all(f"<!-- table {name}-endpoints -->" in page for name in PLANS)


def test_without_results_everything_is_said_not_to_have_run(results):
    page = section()
    rows = [row for row in page.splitlines() if "? |" in row]
    assert len(rows) == len(question_tables.QUESTIONS)
    read = [len(one[-1]) for one in question_tables.QUESTIONS]
    assert [row.count(question_tables.NOT_YET) for row in rows] == read
    assert [row.count(f"| {question_tables.NOT_READ} |") for row in rows] == [2 - count for count in read]
    tables = len(question_tables.TABLES) - 1  # but that of the questions
    assert page.count("No results yet: bench/results has no ") == tables
    sentences = len(question_tables.NUMBERS)
    assert len(list(cells(page))) == 3 * len(rows) + tables + sentences and not differing(page)


def test_tables_fill_from_results_and_the_audit_finds_the_same(results):
    before = section()
    chain = planned("matched-testbed-chain", test_seeds=list(range(12)))
    write_results(results_of(chain), results / "matched-testbed-chain.json.gz")
    rounding = planned("four-bits", test_seeds=list(range(10)))
    some = results_of(rounding)  # of which two comparisons have run
    kept = [run for run in some.runs if run.run.arm.name in ("nvfp4", "nvfp4_rtn", "bf16")]
    write_results(Results(rounding, kept), results / "four-bits.json.gz")
    assert {cell.where for cell in differing(before)} >= {
        "matched-testbed-chain-endpoints: matched-testbed-chain has run"
    }
    for cached in (study_tables.study, question_tables.found):
        cached.cache_clear()
    page = section()
    assert not differing(page)
    (paper,) = [row for row in page.splitlines() if "| matched-testbed-chain: paper |" in row]
    assert "**helps**: aqn_003 \N{MINUS SIGN} none_uncorrected, aqn_01" in paper and "undecided" in paper
    for arm, met in (("aqn_003", "missed"), ("sample_03", "met"), ("temperature_1", "missed")):
        (dose,) = [row for row in page.splitlines() if row.startswith(f"| `{arm}`")]
        assert dose.split(" | ")[2:] == ["1", "0.03", "0.03 to 0.03", f"{met} |"]
    (rate,) = [row for row in page.splitlines() if "| four-bits: nf4 |" in row]
    assert rate.count(question_tables.NOT_YET) == rate.count(question_tables.NOT_READ) == 1
    assert "13 comparisons, of which 11 have not run" in page
    assert sum("\N{MINUS SIGN}" in row and "; " in row for row in page.splitlines()) >= 18


def test_a_rate_that_tuning_seeds_chose_is_shown_and_an_end_of_its_grid_is_said_to_be_one(results):
    """Full tuning has a grid of its own, and its second rate is best; LoRA takes the last of its grid."""
    full = planned("full", test_seeds=[0, 1, 2], tuning_seeds=[10, 11, 12])
    runs = []
    for arm in full.arms.values():
        grid = full.rates(arm)
        best = grid[1] if arm.learning_rates else grid[-1]
        for rate in grid:
            for seed in (*full.tuning_seeds, *(full.test_seeds if rate == best else ())):
                level = 0.05 if rate == grid[0] else 0.3 + 0.2 * (rate == best) + 0.01 * (seed % 10)
                curve = by_key({"accuracy": level, "accuracy/steps_2": 0.1} for _ in full.eval_at)
                step = by_key({"entropy": 1.0} for _ in range(full.steps))
                facts = {"device": "x", "commit": "c"}
                runs.append(RunResult(Run(arm, seed, rate), step, full.eval_at, curve, facts=facts))
    write_results(Results(full, runs), results / "full.json.gz")
    page = section()
    assert not differing(page)
    rows = {row.split(" | ")[0][2:]: row for row in page.splitlines()}
    assert rows["full_bf16, 2e-06"].endswith("| 0.510 (0.010) | 0 of 3 | yes |")
    assert rows["full_bf16, 1e-06"].endswith("| 3 of 3 | |")
    assert rows["lora_bf16, 0.0008"].endswith("| yes, an end |")
    assert "| 2e-06 |" in rows["full_bf16"]
    assert differing(page.replace("yes, an end", "yes"))
    assert differing(page.replace("3 of 3 | |", "2 of 3 | |"))


@pytest.mark.parametrize(("said", "instead"), [
    ("**helps**: aqn_003", "**harms**: aqn_003"), ("| 12 and", "| 11 and"), ("; 0.", "; 1."),
    ("| met", "| missed"),
])  # fmt: skip
def test_a_changed_word_count_or_rate_differs(results, said, instead):
    chain = planned("matched-testbed-chain", test_seeds=list(range(12)))
    write_results(results_of(chain), results / "matched-testbed-chain.json.gz")
    page = section()
    text = page if said in page else page.replace("| 0 and", "| 12 and", 1)
    changed = text.replace(said, instead, 1)
    assert changed != page and differing(changed)
