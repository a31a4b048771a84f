"""What is read from the cells of a probe, by hand."""

import math

import pytest

from lab.writers import probe_rows
from lab.writers.probe_rows import beside, rows_of

# Of two problems many a resample has none that the clean policy solves, or none with a KL.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in ("divide by zero", "invalid value")]


def cell(right, answers, kl, entropy, **fields):
    """A cell of two problems with 8 samples each, whose completions have 10 and 30 tokens together."""
    numbers = {"right": right, "answers": answers, "kl": kl, "entropy": entropy, "tokens": [10, 30]}
    return {"policy": "p", "task": "t", "strength": 0.0, "numbers": numbers | {"ess": [0.5, 0.7]}} | fields


CLEAN = cell([4, 0], [5, 4], [0.0, 0.0], [5.0, 15.0], what="clean")
TOKENS = {"problem": [0, 0, 1], "shift": [1.0, 2.0, -6.0], "lift": [0.0, 0.3, 0.9]}
PERTURBED = cell(
    [6, 2], [3, 4], [1.0, 3.0], [10.0, 60.0], what="a", target=0.1, strength=2.0, solutions=TOKENS
)


def rows(cells, **probe):
    return {row.cell: row for row in rows_of({"cells": cells, "probe": {"samples": 8} | probe})}


def test_a_perturbed_cell_beside_the_clean_one():
    found = rows({"p-t-clean": CLEAN, "p-t-clean-reference": CLEAN, "p-t-a-0.1": PERTURBED})
    assert found.keys() == {"p-t-clean", "p-t-a-0.1"}
    assert found["p-t-a-0.1"].target == 0.1 and found["p-t-a-0.1"].strength == 2.0
    numbers = {key: one.value for key, one in found["p-t-a-0.1"].numbers.items()}
    assert numbers == pytest.approx({
        "pass@1": 0.5, "solved": 1.0, "answers": 3.5, "ess": 0.6, "kl": 0.1, "entropy": 70 / 40,
        "shift": -1.0, "lift": 0.4, "success": 0.25, "gain": math.log(2), "per_nat": 10 * math.log(2),
        "solved_more": 0.5, "answers_more": -1.0, "entropy_more": 50 / 40,
    })  # fmt: skip
    success = found["p-t-a-0.1"].numbers["success"]
    assert (success.low, success.high) == (0.25, 0.25), "the same in both problems"
    solved = found["p-t-a-0.1"].numbers["solved_more"]
    assert (solved.low, solved.high) == (0.0, 1.0), "of one problem alone"
    assert found["p-t-clean"].numbers.keys() == {"pass@1", "solved", "answers", "ess", "kl", "entropy"}


def test_the_gain_is_of_groups_of_8_and_averaged_before_the_logarithm():
    """Of 16 samples, 1 right one is in half of the groups of 8, and one of 2 in all but 28 of 120."""
    one, two = CLEAN | {"numbers": CLEAN["numbers"] | {"right": [1, 0]}}, CLEAN
    two = two | {"numbers": two["numbers"] | {"right": [2, 0]}}
    assert beside(two, one, 16)["gain"].value == pytest.approx(math.log((1 - 28 / 120) / 0.5))


def test_formats_are_beside_the_first_one():
    given = {"tokens": [4, 4], "entropy": [2.0, 2.0], "kl": [0.0, 0.0]}
    plain = CLEAN | {"policy": None, "temperature": 1.0, "prefixes": given, "error": 0.0}
    rounded = plain | {"prefixes": given | {"entropy": [3.0, 5.0], "kl": [0.8, 0.8]}, "error": 0.08}
    cells = {
        "format-t-bf16-0-plain": plain | {"what": "bf16"},
        "format-t-nvfp4-0-plain": rounded | {"what": "nvfp4"},
        "format-t-nvfp4-0-matched": CLEAN | {"what": "nvfp4", "policy": None, "temperature": 0.9},
    }
    for one in cells.values():
        del one["strength"]
    found = rows(cells, formats={"bf16": {}, "nvfp4": {}})
    first, second, matched = (found[name].numbers for name in cells)
    assert first["prefix_more"].value == first["error"].value == 0 and "success" not in first
    assert second["prefix_more"].value == 0.5 and second["prefix_kl"].value == pytest.approx(0.2)
    assert second["error"].value == 0.08 and second["success"].value == 0 and "per_nat" not in second
    assert found["format-t-nvfp4-0-matched"].strength == 0.9
    assert "gain" in matched and not matched.keys() & {"prefix_more", "error"}


def test_cells_of_one_file_beside_each_other(monkeypatch):
    results = {"cells": {"a": PERTURBED, "b": CLEAN}, "probe": {"samples": 8}}
    monkeypatch.setattr(probe_rows, "probe", {"x": results}.get)
    assert probe_rows.over("x", "a", "b")["gain"].value == pytest.approx(math.log(2))
    assert probe_rows.over("x", "b", "a")["gain"].value == pytest.approx(-math.log(2))
