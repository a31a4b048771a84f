"""Numbers in README and docs are those of committed results."""

import pytest

from lab.writers.numbers import all_untied, untied_numbers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("takes 7.3 s on", ["7.3 s"]),
        ("15,578 tokens/s and 2.1x, 25 % less", ["15,578 tokens/s", "2.1x", "25 %"]),
        ("one H100 80GB, 17 GB of it", ["17 GB"]),
        ("about .68 s, twice 3e-2 s", [".68 s", "3e-2 s"]),
        ("128 samples x 1024 tokens of 7B, issue 3, 4 sequences, 16-bit", []),
        ("in `7.3 s` and [4 s](results/7 s)", ["4 s"]),
        ("<!-- number step -->7.3 s<!-- / --> and 4 s", ["4 s"]),
        ("<!-- table decode -->\n| 7 s |\n<!-- /table -->\n5 s", ["5 s"]),
        ("| batch | s |\n|-|-|\n| 64 | **7.31** |\n| 7B | 1024 |", ["7.31", "1024"]),
        ("| batch | s <!-- by hand: theirs --> |\n|-|-|\n| 64 | 7.31 |\n\n8 s", ["8 s"]),
        ("a card of 24 GB <!-- by hand: its size -->\n48 GB", ["48 GB"]),
        ("a card of 24 GB <!-- by hand: -->", ["24 GB"]),
        ("```\n7 s\n```\n\n    8 s\n\n9 s", ["9 s"]),
    ],
)
def test_numbers_without_a_result_are_found(text, found):
    assert [one.text for one in untied_numbers("page.md", text)] == found


def test_the_line_is_named():
    (one,) = untied_numbers("page.md", "<!-- table x -->\n\n<!-- /table -->\n\ntakes 7 s")
    assert str(one) == "page.md:5: 7 s"


def test_every_number_in_readme_and_docs_comes_from_a_result():
    assert "\n".join(map(str, all_untied())) == ""
