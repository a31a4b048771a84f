# ruff: noqa: RUF001 - look-alike characters are what some of these tests are about
"""Which answers are equal, and what no spelling may hide."""

import random
import time

import pytest

from qerl.tasks.answers import (
    MAX_ANSWER_CHARS,
    equal,
    final_answer,
    last_number,
)
from qerl.tasks.quantity import plain, quantity


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


# Numbers with something around them


EIGHTEEN = r"""
18 dollars|18 eggs|18 USD|USD 18|$18|\$18|US$18|18$|18 $|£18|18 €|18€|18.00 dollars|18 dollars per day
$18 per day|18 km/h|18km|18 m/s^2|18 m²|18 square feet|18 sq. ft.|18 years old|18 hours a day|18th|18 am
18 degrees|18°|18^\circ|18^{\circ}|18%|18\%|18 percent|**18**|**18** dollars|**18 dollars**|18**|__18__
`18`|$18$|$$18$$|\[18\]|\(18\)|\text{18}|\text{18 dollars}|18\text{ dollars}|18 \text{dollars}
18~\mathrm{km/h}|18.|$18$.|18 dollars.|\[18.\]|x = 18|x = 18 dollars|x + y = 18|9 + 9 = 18|+18|018|18.0
1.8e1|1.8E+01
1.8 \times 10^1|1.8×10^1|(18)|18 more apples|18 quarters|18 times|18 dozen|\frac{36}{2}|√324|3²+9
"""
NOT_EIGHTEEN = r"""
18 or 20|20 or 18|18, 20|20, 18|17,18,19|18 20|18;20|20;18|1 to 100|18-20|17..19|[1, 100]|18 to 20|18 and 20
(18, 20)|\{18, 20\}|18 \text{ or } 20|20 \text{ or } 18|18 \lor 20|18 \cup 20|\pm 18|18 \pm 2|18 \quad 20
18 \\ 20|18 \mid 20|18 / 20|x=18 or x=20|x=20, x=18|x=1, y=18|18 or twenty|eighteen or 18|18 or XX|not 18
18 eggs or 20|18 eggs, 20 boxes|18 not twenty|18 is wrong|18 if even|about 18 to 20|18 > 17|x < 18
18 dollars 20|11 = 18|17 = 18|18 = 17 = 18|20 = x = 18|18 = x = 20|x \in [1, 100]|18/18|1/18|18^2|18²
18 squared|18 million
18 hundred|18!|18x|18 x|18 xy|x18|18a|18 halves|18 plus two|18\pi|18 \phantom{20}|18 <!-- 20 -->|18-|-18|-$18
20 <!-- --> 18|18 #### 20|20 #### 18|18<answer>20|18 # 20|20 \color{red} 18|20 \unknown 18|18 \hspace{20}|$$
\boxed{18} \boxed{20}|18 \& 20|18 & 20|18 ? 20|20 @ 18|18_20|18_{20}|18(20|20 ) 18|20 . 18|18.20|1 8|1,8|180
18 eggs -20|$18-20|18e1|18e0.5|18.5.5|18/1/18|eighteen|18 18|18 % 20|1.8|0.18
18=|=18 or 20|1x=8|1 x = 8|18 eggs (or 20)|18 eggs (20)|$18 or $20|$18 $20|18\$20|1\text{8}
18..20|20..18|1. 18|1.\ 18|1!18|9 9|7 11|2. 9|18 hundreds|18 thousands|18 millions
1**8**|1 million 8|18 + x|18 \text{ or 20}|18 \text{ or twenty}
"""


def spellings(table: str) -> list[str]:
    return table.strip().replace("\n", "|").split("|")


@pytest.mark.parametrize(
    "text", [*spellings(EIGHTEEN), "\uff11\uff18", "18\u00a0eggs", "\u200b18", "\u221218+36"]
)
def test_a_number_counts_with_what_people_write_around_it(text: str) -> None:
    assert equal(text, "18")
    assert not equal(text, "20")
    assert not equal(text, "1")


@pytest.mark.parametrize("text", [*spellings(NOT_EIGHTEEN), "18\u201320", "18 \u2013 20", "18 | 20"])
def test_an_answer_that_hedges_or_says_something_else_is_wrong(text: str) -> None:
    assert not equal(text, "18")


SEPARATORS = [
    *"#$&()*,.:;<>?@[]\\^_`{|}~→…—–·、，；至｜⇒≈≠√¿•½²∨∪／",
    *(
        r"\to ",
        r"\sim ",
        r"\dots ",
        r"\vee ",
        r"\approx ",
        r"\mid ",
        r"\unknown ",
        r"\ne ",
        r"\cup ",
        r"\not ",
    ),
    *(r"\Rightarrow ", r"\rightarrow ", r"\text{--}", r"\text{ or }", r"\mbox{or}", r"\operatorname{or}"),
    *(r"\hspace{1}", r"\& ", r"\# ", "<br>", " or ", " and ", " to ", "or", "  ", "\n"),
]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_no_separator_hides_a_second_answer(separator: str) -> None:
    for pattern in ("18{}20", "20{}18", "18 {} 20", "20 {} 18", "17{}18{}19"):
        text = pattern.replace("{}", separator)
        assert not equal(text, "18"), text


@pytest.mark.parametrize("aside", [*"#@?~→…—、至", r"\to", r"\Rightarrow", r"\implies", r"\approx"])
def test_what_the_parser_passes_over_hides_nothing_in_an_expression(aside: str) -> None:
    for text in (rf"\sqrt{{7}} {aside} 5", rf"5 {aside} \sqrt{{7}}", rf"\sqrt{{7}}{aside}5"):
        assert not equal(text, r"\sqrt{7}"), text


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1 1/2", "1.5"),
        ("1 1/2 cups", r"\frac{3}{2}"),
        (r"1\frac{1}{2}", "1.5"),
        ("1½", "1.5"),
        ("-2 1/4", "-2.25"),
        ("1/2 cup", "0.5"),
        (r"\frac12 \text{ cup}", "1/2"),
        ("1e3", "1000"),
        ("1E-2", "0.01"),
        ("18 million", "18,000,000"),
        ("2 hundred dollars", "200"),
        (r"1\,000", "1000"),
        (r"10,\!000", "10000"),
        ("∞", r"\infty"),
        ("-infinity", r"-\infty"),
        ("−18", "-18"),
        ("–18", "-18"),
        (r"\frac{1}{2}.", r"\frac{1}{2}"),
        ("$x^2+1$.", "x^2+1"),
        ("A.", "A"),
        ("**Tuesday**.", "Tuesday"),
        (r"\textbf{(B)}", "B"),
        ("18 dollars", r"\$18"),
        ("18 km", "18 kilometers"),
        ("3√2", r"3\sqrt{2}"),
        (r"x \in [1,2]", "[1,2]"),
        ("10²", "100"),
        (r"0.\overline{3}", "1/3"),
        (r"2.1\overline{63}", r"\frac{119}{55}"),
        (r"$\$32,\!348$", "32348"),
        ("18 thousands", "18000"),
        (r"1 + \frac 1 2", "1.5"),
        ("June 20", r"\text{June 20}"),
        (r"\text{June 20}.", "June 20"),
    ],
)
def test_spellings_of_one_value(answer: str, reference: str) -> None:
    assert equal(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1 1/2", "1"),
        ("1 1/2", "5.5"),
        ("1/2", "2"),
        ("10²", "102"),
        ("18 cents", "18 dollars"),
        ("18 cents", "$18"),
        ("∞", "-\\infty"),
        ("infinity", "1"),
        ("0.33", "1/3"),
        ("18 cents", "18 USD"),
        ("1e3", "3"),
        (r"0.\overline{3}", "0"),
        (r"0.\overline{3}", "0.3"),
        ("B", "A"),
        ("AB", "BA"),
        ("2^3", "23"),
        ("2**3", "23"),
    ],
)
def test_different_values(answer: str, reference: str) -> None:
    assert not equal(answer, reference)
    assert not equal(reference, answer)


def test_a_name_before_an_equals_sign_is_no_part_of_the_answer() -> None:
    """The right-hand side counts, as in math-verify; a chain of different numbers has none."""
    assert equal("5x-7y+11z+4=0", "0")
    assert equal("9 + 4 = 13", "13")
    assert not equal("11 = 12", "12")
    assert not equal("12 = 11", "12")
    assert equal("y = 2x + 3", "2x + 3")
    assert equal("y = 2x + 3", "y = 3 + 2x")
    assert not equal("y = 2x + 3", "y = 2x + 4")


GOLDS = [  # as they stand in MATH and Big-Math
    r"\left( 3, \frac{\pi}{2} \right)", r"\frac{14}{3}", "p - q", r"3\sqrt{13}", r"\text{Evelyn}", "42",
    "27", r"90^\circ", r"11\sqrt2", "4210_{5}", "(6,31,-1)", r"\frac{3}{56}", "10,080", r"\$32,\!348",
    r"6\text{ inches}", "-2,1", "[-2,7]", r"(-\infty,0)\cup(1,\infty)", r"x \in [-2,7]",
    r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}", "y = 2x + 3", "6 - 5i", "5x - 7y + 11z + 4 = 0",
    r"\text{odd}", r"1 \pm \sqrt{19}", r"0.\overline{3}", r"\text{(C)}", r"\{1, 2, 5\}", "x^3+3x-6",
    r"\frac{9}{256}\text{ cm}", r"\sqrt[3]{4}", "1,-2", r"-\frac{35}{9}", r"2.5 \times 10^{-3}",
    r"\binom{10}{3}", "2k+1",
]  # fmt: skip


@pytest.mark.parametrize("gold", GOLDS)
def test_an_answer_of_the_data_sets_equals_its_own_spellings(gold: str) -> None:
    wide = gold.replace("frac", "dfrac") if r"\frac" in gold else gold.replace("=", " = ")
    for text in (f"${gold}$.", rf"\[{gold}\]", f"**{gold}**", f" {wide}. "):
        assert equal(text, gold), text


@pytest.mark.slow
def test_answers_of_the_data_sets_differ_from_each_other() -> None:
    rng = random.Random(5)
    for _ in range(120):
        one, other = rng.sample(GOLDS, 2)
        assert not equal(one, other), (one, other)


def test_no_answer_of_a_thousand_characters_takes_long() -> None:
    bombs = [
        "18 " + "a " * 498,
        "**" * 499,
        "$" * 999,
        "1,111" * 199,
        "(" * 999,
        "1 " * 499,
        "\\text{" * 166,
        "#" * 999,
    ]
    bombs += [
        "18 " + "m/" * 498,
        "1e999",
        "1 " + "1/" * 498,
        "=".join(["x"] * 499),
        "9" * 999 + "e999",
        "-" * 999,
    ]
    started = time.perf_counter()
    for text in bombs:
        plain_text = plain(text)
        quantity(plain_text)
        assert len(plain_text) <= len(text)
    assert time.perf_counter() - started < 1
    started = time.perf_counter()
    for mark in ("<answer>", "</answer>", "#### 1 ", "1/", "1 ", "-", "1,111", r"\frac{1}"):
        final_answer(mark * 20_000)
        last_number(mark * 20_000)
    assert time.perf_counter() - started < 5


def test_a_number_before_what_cannot_be_parsed_is_no_answer() -> None:
    for letters in range(300, 999 - len("18  20"), 50):
        assert not equal(f"18 {'x' * letters}", "18"), letters
        assert not equal(f"18 {'x' * letters} 20", "18"), letters
    assert not equal(f"18 {'x' * 990}", "18")


def test_a_derivation_is_no_answer_and_costs_nothing() -> None:
    started = time.perf_counter()
    assert not equal("(x+1)^" * MAX_ANSWER_CHARS, "12")
    assert time.perf_counter() - started < 0.1
