"""Answers that reach a scorer which evaluates them: literals and formulas, and nothing that runs or hangs."""

import pytest

from qerl.tasks.evaluated import Kind, may_be_evaluated


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("[[1, 2], [-3, 4.5]]", "literal"),
        ("['A', 'B']", "literal"),
        ("1, 2", "literal"),
        ("(3 + 4) * 5 - 6 / 2", "formula"),
        ("2*x**3 - x**-1 + C", "formula"),
        ("-exp(2*x)*sin(x)/5", "formula"),
    ],
)
def test_answers_in_the_right_form_are_let_through(answer: str, kind: Kind) -> None:
    assert may_be_evaluated(answer, kind)


@pytest.mark.parametrize("kind", ["literal", "formula"])
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')",
        "entry['answer']",  # a local variable of the scorer
        "entry",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "open('/etc/passwd')",
        "x.__class__",
        "f'{x}'",
        "10**999999999",
        "(9**20)**20",
        "9**9**9",
        "x**(10**9)",
        "9" * 40,
        "exp(*[1])",
        "1 << 99",
        "[1] * 10**9",
        "-" * 3000 + "1",
    ],
)
def test_nothing_else_is(answer: str, kind: Kind) -> None:
    assert not may_be_evaluated(answer, kind)


@pytest.mark.parametrize("answer", ["1 2 3", "99999!", "1; 2", "", "2x"])
def test_text_that_python_does_not_parse_is_no_formula_and_harms_no_eval(answer: str) -> None:
    assert may_be_evaluated(answer, "literal")
    assert not may_be_evaluated(answer, "formula")
    with pytest.raises(SyntaxError):
        eval(answer, {"__builtins__": {}})
