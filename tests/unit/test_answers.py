"""Finding answers in texts, deciding their equality, and the formats that prompts ask for."""

import random
import time

import pytest

from qerl.errors import QeRLError
from qerl.tasks.answers import (
    MAX_ANSWER_CHARS,
    after_hashes,
    answer_tag,
    as_number,
    boxed,
    equal,
    final_answer,
    last_number,
)
from qerl.tasks.formats import FORMATS, get_format


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>\n 7 \n</answer>", "7"),
        ("<answer>6</answer> no, <answer>7</answer>", "7"),
        ("<answer>7", None),
        ("7", None),
    ],
)
def test_answer_tag(text: str, found: str | None) -> None:
    assert answer_tag(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9 + 4 = 13\n#### 13", "13"),
        ("#### 13 apples \nAnd so on", "13 apples"),
        ("####13", "13"),
        ("#### 12\n#### 13", "13"),
        ("####\n13", None),
        ("### 13", None),
    ],
)
def test_after_hashes(text: str, found: str | None) -> None:
    assert after_hashes(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{7}", "7"),
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\sqrt{\frac{a}{b^{2}}}} and more {braces}", r"\sqrt{\frac{a}{b^{2}}}"),
        (r"\boxed{6} no, \boxed{7}", "7"),
        (r"\boxed{7} then \boxed{8", "7"),
        (r"\boxed{8", None),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{7}}", "7"),
        ("boxed{7}", None),
    ],
)
def test_boxed(text: str, found: str | None) -> None:
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("3 and -4.5", "-4.5"), ("it is 1,234,567.", "1,234,567"), ("none", None), ("12", "12")],
)
def test_last_number(text: str, found: str | None) -> None:
    assert last_number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>\\boxed{6}</think><answer>7</answer>", "7"),
        (r"<answer>\boxed{7}</answer>", "7"),
        ("<answer>#### 7</answer>", "7"),
        (r"#### 6 but \boxed{7}", "7"),
        ("<think>#### 6</think> #### 7", "7"),
        ("<think>#### 6 and on and on", None),  # cut off while it thinks
        ("thinking </think> #### 7", "7"),  # the template opened the tag
        ("the result is 7", None),
    ],
)
def test_final_answer(text: str, found: str | None) -> None:
    assert final_answer(text) == found


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1,000", "1000"),
        ("$12.00", "12"),
        (r"\$12", "12"),
        ("-$3", "-3"),
        ("12.", "12"),
        ("+5", "5"),
        (".5", "0.5"),
        ("007", "7"),
        ("27.0", "27"),
        (r"1{,}000", "1000"),
        ("1/2", "0.5"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", "1/2"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"$\sqrt{8}$", r"2\sqrt{2}"),
        (r"(x+1)^2", r"x^2+2x+1"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
        (r"50\%", "50"),
        ("Tuesday", "tuesday."),
        (r"\text{Evelyn}", "Evelyn"),
        ("12345678901234567890123", "12,345,678,901,234,567,890,123"),
    ],
)
def test_equal_answers(answer: str, reference: str) -> None:
    assert equal(answer, reference)
    assert equal(reference, answer)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("12", "1"),  # the first character is the same
        ("1", "12"),
        ("120", "12"),
        ("12", "-12"),
        ("12.01", "12"),
        ("1,00", "100"),
        ("12345678901234567890123", "12345678901234567890124"),
        ("0.3333333333333333", "0.33333333333333331"),
        ("1/2", "1/3"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        (r"\sqrt{2}", r"\sqrt{3}"),
        ("Tuesday", "Thursday"),
        ("listen", "silent"),  # as products of symbols these are equal
        ("", "12"),
        ("  ", "12"),
        ("12 13", "12"),
        (r"(1, 2)", r"(2, 1)"),
    ],
)
def test_different_answers(answer: str, reference: str) -> None:
    assert not equal(answer, reference)


def test_whole_numbers_are_compared_exactly() -> None:
    rng = random.Random(11)
    for _ in range(300):
        value = rng.randint(-(10 ** rng.randint(1, 30)), 10 ** rng.randint(1, 30))
        assert equal(f"{value:,}", str(value))
        assert not equal(str(value + rng.choice((-1, 1))), str(value))


@pytest.mark.parametrize("text", ["", "-", ".", "1e5", "1/2", "12 km", "1,2345", "٣", "x"])
def test_only_plain_decimals_are_numbers(text: str) -> None:
    assert as_number(text) is None


def test_a_derivation_is_no_answer_and_costs_nothing() -> None:
    started = time.perf_counter()
    assert not equal("(x+1)^" * MAX_ANSWER_CHARS, "12")
    assert time.perf_counter() - started < 0.1


GOOD = {
    "tags": "<think> 3 + 4 = 7 </think>\n<answer> 7 </answer>",
    "boxed": r"3 + 4 = 7, so $\boxed{7}$.",
    "hashes": "3 + 4 = 7\n#### 7",
    "number": "3 + 4 makes 7",
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
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_reward_and_extraction_agree(name: str) -> None:
    fmt = get_format(name)
    assert fmt.followed(GOOD[name])
    assert fmt.extract(GOOD[name]) == "7"
    assert [text for text in BAD[name] if fmt.followed(text)] == []


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


def test_unknown_format() -> None:
    with pytest.raises(QeRLError, match="'xml' is unknown; use one of: tags, boxed, hashes, number"):
        get_format("xml")
