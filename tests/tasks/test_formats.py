"""The formats that prompts ask for: what is rewarded is what is read."""

import pytest

from qerl.errors import QeRLError
from qerl.tasks.answers import (
    equal,
)
from qerl.tasks.formats import FORMATS, get_format

GOOD = {
    "tags": "<think> 3 + 4 = 7 </think>\n<answer> 7 </answer>",
    "boxed": r"3 + 4 = 7, so $\boxed{7}$.",
    "hashes": "3 + 4 = 7\n#### 7",
    "number": "3 + 4 makes 7",
    "code": "The sum:\n```python\n7\n```",
}
BAD = {
    "tags": [
        "<answer>7</answer>",
        GOOD["tags"] + " and more",
        GOOD["tags"] * 2,
        "<think></think><answer>7</answer>",
    ],
    "boxed": [r"\boxed{6} or \boxed{7}", r"\boxed{7", "7"],
    "hashes": ["7", "#### 6\n#### 7", "#### 7\nand more", "so #### 7", "####"],
    "number": ["seven"],
    "code": ["7", "```python\n7", "```python\n6\n```\n```python\n7\n```"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_reward_and_extraction_agree(name: str) -> None:
    fmt = get_format(name)
    assert fmt.followed(GOOD[name])
    assert fmt.extract(GOOD[name]) == "7"
    assert [text for text in BAD[name] if fmt.followed(text)] == []


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_in_a_format_follows_it(name: str) -> None:
    fmt = get_format(name)
    text = fmt.write("3 + 4 = 7\n7 - 2 = 5", "5")
    assert text.find("3 + 4 = 7\n7 - 2 = 5") >= 0
    assert fmt.followed(text) and fmt.extract(text) == "5"


def test_instructions_ask_for_what_is_rewarded() -> None:
    marks = {
        "tags": ["<think>", "</think>", "<answer>", "</answer>"],
        "boxed": [r"\boxed{}"],
        "hashes": ["####"],
    }
    for name, expected in marks.items():
        assert all(mark in FORMATS[name].instruction for mark in expected)


def test_only_the_number_format_takes_an_unmarked_number() -> None:
    takes = [name for name, fmt in FORMATS.items() if fmt.extract("3 + 4 makes 7") is not None]
    assert takes == ["number"]


def test_an_unmarked_fraction_is_not_its_denominator() -> None:
    extract = FORMATS["number"].extract
    assert [equal(extract("It makes 1/2") or "", right) for right in ("2", "0.5")] == [False, True]


def test_unknown_format() -> None:
    with pytest.raises(QeRLError, match="'xml' is unknown; use one of: tags, boxed, hashes, number"):
        get_format("xml")
