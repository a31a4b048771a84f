"""Tables and numbers of README and docs are those of bench/results."""

import re

import pytest

from bench import tables
from bench.figures import NUMBERS, TABLES
from bench.result import RESULTS, read_rows
from qerl.errors import QeRLError


def test_pages_hold_what_the_results_say():
    assert [page.name for page in tables.outdated()] == [], "run: python -m bench.tables"


def test_every_table_and_number_stands_in_a_page():
    text = "".join(page.read_text() for page in tables.PAGES)
    assert {name for name in TABLES if f"<!-- table {name} -->" not in text} == set()
    assert {name for name in NUMBERS if f"<!-- number {name} -->" not in text} == set()


def test_a_changed_number_is_written_anew():
    sentence = "It takes <!-- number demo-minutes -->1 minute<!-- / -->.\n"
    page = f"{sentence}\n<!-- table demo -->\nold\n<!-- /table -->\n"
    written = tables.render(page)
    assert "1 minute<" not in written and "old" not in written
    assert "| seed |" in written and written.endswith("<!-- /table -->\n")
    assert tables.render(written) == written


def test_a_result_that_a_table_refuses_is_told(monkeypatch, capsys):
    def refuses():
        raise QeRLError("1 of 2 runs failed.")

    monkeypatch.setitem(TABLES, "serve-learning", refuses)
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    assert tables.main() == 2
    assert capsys.readouterr().err == "error: 1 of 2 runs failed.\n"


def test_a_mark_without_a_table_is_an_error():
    with pytest.raises(KeyError, match="unheard"):
        tables.render("<!-- table unheard -->\n<!-- /table -->\n")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_every_result_says_where_it_comes_from(file):
    rows = read_rows(file.stem)
    assert rows
    for row in rows:
        assert {"commit", "date", "command"} <= row.keys() and row.keys() & {"gpu", "machine"}
        assert re.fullmatch(r"[0-9a-f]{7}(-dirty)?", row["commit"])
        assert "note" in row or not row["commit"].endswith("-dirty"), "what was changed must be said"
        assert re.fullmatch(r"2\d{3}-\d\d-\d\d( \d\d:\d\d UTC)?", row["date"])
