"""Built-in environments: what they answer, when they end, and that no text does harm."""

import time
from fractions import Fraction
from typing import Any

import pytest

from qerl.agents.environment import check_environment, is_text
from qerl.agents.tools import check_tool
from qerl.environments import get_environment
from qerl.environments.calculator import LONGEST, Calculator, calculator, evaluate, written
from qerl.environments.guess_number import GuessNumber
from qerl.environments.registry import ENVIRONMENTS, TOOLS, get_tool
from qerl.errors import QeRLError
from qerl.tasks import get_task

# Expressions


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("71 * 68", "4828"),
        ("2 + 3 * 4 - -1", "15"),
        ("(2 + 3) * 4", "20"),
        ("7 / 2 * 2", "7"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.3333333333"),
        ("17 // 5", "3"),
        ("17 % 5", "2"),
        ("2 ** -2", "0.25"),
        ("1,000 × 2 ÷ 4 − 1 =", "499"),  # noqa: RUF001 - as people write
        ("3 x 4 = ?", "12"),
        ("2 ^ 10", "1024"),
        ("9" * 60 + " + 1", "1" + "0" * 60),
    ],
)
def test_an_expression_has_its_exact_value(expression: str, value: str) -> None:
    assert written(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "divides by zero"),
        ("5 % 0", "divides by zero"),
        ("0 ** -1", "divides by zero"),
        ("9 ** 9 ** 9", "A power in the expression is too large"),
        ("1 ** (9 ** 70)", "A power in the expression is too large"),
        ("1.5 ** 1000000", "A power in the expression is too large"),
        ("2 ** 0.5", "The exponent 0.5 is no whole number"),
        ("9" * 100, "A number in the expression is too large"),
        ("1e999", "too large"),
        ("1e99", "A number in the expression is too large"),
        ("1 / " + " / ".join(["9" * 50] * 3), "A number in the expression is too large"),
        ("__import__('os').system('true')", "holds Call"),
        ("x.y", "holds Attribute"),
        ("True + 1", "holds Constant"),
        ("'a' * 9", "holds Constant"),
        ("1 if 2 else 3", "holds IfExp"),
        ("1 << 9", "holds BinOp"),
        ("1; 2", "is no arithmetic expression"),
        ("", "is no arithmetic expression"),
        ("1 +", "is no arithmetic expression"),
        ("(" * 99 + ")" * 99, "holds Tuple"),
        ("1 + " * 60 + "1", f"has 241 characters; write at most {LONGEST}"),
        ("1\x00", "is no arithmetic expression"),
    ],
)
def test_any_other_text_is_refused_in_a_sentence_and_at_once(expression: str, said: str) -> None:
    start = time.perf_counter()
    with pytest.raises(QeRLError, match=said):
        evaluate(expression)
    assert time.perf_counter() - start < 1


def test_deep_and_long_expressions_within_the_limit_have_a_value() -> None:
    assert evaluate("-" * (LONGEST - 1) + "1") == Fraction(-1)
    assert evaluate("(" * 80 + "1" + ")" * 80) == 1


# The calculator


def test_the_calculator_is_a_tool_that_a_model_can_be_told_of() -> None:
    assert check_tool(calculator)("71 * 68") == "4828"
    assert get_tool("calculator") is calculator is TOOLS["calculator"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("71 * 68 =", "4828"),
        ("71 * 68", "4828"),
        ("71 * 68 = 4428\n#### 4428", "4828"),  # what follows the sign is not read
        ("\n(3 + 4) × 2\n", "14"),  # noqa: RUF001
        ("4 / 0 =", "The expression divides by zero; write another one."),
        ("#### 4828", None),
        ("-12", None),
        ("", None),
        ("Ella * 71 = 3222", None),
        ("There are 71 * 68 balls", None),
    ],
)
def test_the_calculator_answers_the_expression_in_the_first_line(text: str, answer: str | None) -> None:
    environment = Calculator()
    environment.reset(prompt=[], answer="4828")
    assert environment.respond(text) == answer


def test_a_worked_session_of_arithmetic_is_what_the_calculator_answers() -> None:
    for level in ("wp1-99x99", "wp2"):
        rows = get_task("arithmetic", level=level, examples=3, calculator=True, train_size=8).train()
        turns = rows[0]["prompt"][1:-1]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        environment = Calculator()
        said = [environment.respond(turn["content"]) for turn in turns[1::2]]
        steps = 1 if level == "wp1-99x99" else 2
        for i in range(steps):  # the first example is whole, the others stop at the first calculation
            assert said[i] == turns[2 * i + 2]["content"]
        assert said[steps] is None and turns[2 * steps + 1]["content"].startswith("#### ")
        assert len(said) == steps + 3 and None not in said[steps + 1 :]


# The guessing game


def play(said: list[str], answer: str = "37", **options: Any) -> tuple[list[str | None], float]:
    game = GuessNumber(**options)
    game.reset(prompt=[], answer=answer)
    return [game.respond(text) for text in said], game.get_reward()


def test_the_game_says_higher_or_lower_until_the_number_is_found() -> None:
    replies, reward = play(["50", "I say 25.", "1 or 37"])
    assert replies == ["50 is too high; guess lower.", "25 is too low; guess higher.", None]
    assert reward == pytest.approx(1 / 3)


def test_the_game_ends_without_reward_at_the_last_guess_or_without_a_number() -> None:
    assert play(["1", "2"], guesses=2) == (["1 is too low; guess higher.", None], 0.0)
    assert play(["no idea"]) == ([None], 0.0)
    assert play(["9" * 9000])[1] == 0.0


def test_a_game_that_was_reset_is_as_new() -> None:
    game = GuessNumber(guesses=2)
    for _ in range(2):
        game.reset(answer="3", prompt=[])
        assert game.get_reward() == 0.0
        assert game.respond("9") == "9 is too high; guess lower."
        assert game.respond("3") is None
        assert game.get_reward() == 0.5


def test_the_game_needs_a_whole_number_and_a_guess() -> None:
    with pytest.raises(QeRLError, match="hides the row's answer, which is 'a half'"):
        GuessNumber().reset(answer="a half")
    with pytest.raises(QeRLError, match="guesses is 0"):
        GuessNumber(guesses=0)


def test_rows_of_the_game_hide_a_number_of_their_range_and_share_no_problem() -> None:
    task = get_task("guess_number", largest=20, train_size=60, test_size=20)
    problems = {}
    for name, rows in (("train", task.train()), ("test", task.test())):
        problems[name] = {(row["prompt"][-1]["content"], row["answer"]) for row in rows}
        for question, answer in problems[name]:
            end = int(question.split(" to ")[1].split(".")[0])
            assert 1 <= int(answer) <= end <= 20
    assert len(problems["train"]) == 60 and len(problems["test"]) == 20
    assert problems["train"].isdisjoint(problems["test"])
    assert task.rewards[0](prompts=[""], completions=["9\n12"], answer=["12"]) == [1.0]


@pytest.mark.parametrize(
    ("options", "said"), [({"largest": 5}, "largest is 5"), ({"train_size": 10**6}, "only")]
)
def test_the_game_refuses_bad_options(options: dict[str, int], said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task("guess_number", **options).train()


# By name


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_built_in_environments_fit_the_contract(name: str) -> None:
    assert is_text(check_environment(get_environment(name, {})))


def test_an_environment_is_made_with_its_options() -> None:
    factory = get_environment("guess_number", {"guesses": 1})
    first, second = factory(), factory()
    assert first is not second
    first.reset(answer="3")
    assert first.respond("4") is None


def test_a_name_or_option_that_is_unknown_is_refused_in_a_sentence(tmp_path) -> None:
    with pytest.raises(QeRLError, match=r"environment 'calculater' is unknown .did you mean 'calculator'"):
        get_environment("calculater", {})
    with pytest.raises(QeRLError, match="environment_options do not fit Calculator"):
        get_environment("calculator", {"digits": 3})
    with pytest.raises(QeRLError, match=r"The tool 'abacus' is unknown; give PATH.py:function"):
        get_tool("abacus")


def test_a_class_of_the_users_own_is_an_environment(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Echo:\n"
        "    def __init__(self, times=1):\n        self.times = times\n"
        "    def reset(self, **row):\n        return None\n"
        "    def respond(self, text):\n        return text * self.times\n"
    )
    assert get_environment(f"{path}:Echo", {"times": 2})().respond("ab") == "abab"
