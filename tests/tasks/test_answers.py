"""Where the final answer of a text stands."""

import pytest

from qerl.tasks.answers import (
    after_hashes,
    answer_tag,
    boxed,
    final_answer,
    last_number,
)
from qerl.tasks.quantity import plain, quantity


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>\n 7 \n</answer>", "7"),
        ("<answer>6</answer> no, <answer>7</answer>", "7"),
        ("<answer>6<answer>7</answer>", "7"),
        ("<answer>7</answer></answer>", "7"),
        ("</answer>7<answer>", None),
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
        ("#### 12 #### 13", "13"),
        ("#### 13 ####", "13"),
        ("##### 13", "13"),
        ("#### ####", None),
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
    [
        ("3 and -4.5", "-4.5"),
        ("it is 1,234,567.", "1,234,567"),
        ("none", None),
        ("12", "12"),
        ("it is 1/2.", "1/2"),
        ("about 1 1/2 cups", "1 1/2"),
        (r"it is $\frac{1}{2}$", r"\frac{1}{2}"),
        ("it is .5", ".5"),
        ("it is 1e3 m", "1e3"),
        ("it is 2^10", "2^10"),
        ("from 3-5", "5"),
    ],
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
    "text", ["", "-", ".", "12,34", "1,2345", "٣", "x", "12 x", "1/0", "e5", "1 2 3", "\\frac{1}{0}"]
)
def test_what_is_not_one_number_has_no_value(text: str) -> None:
    assert quantity(plain(text)) is None
