"""Arithmetic tasks: problems that are right, seeded, and do not leak into the held-out set."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from qerl.errors import QeRLError
from qerl.tasks import get_task
from qerl.tasks.arithmetic import LEVELS, Level, draw_problems, make_problem, split_of
from tests.support.tasks import messages, questions

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


@pytest.mark.parametrize("level", LEVELS)
def test_arithmetic_answers_follow_from_the_story(level: str) -> None:
    for problem in draw_problems("train", LEVELS[level], 150, seed=3):
        numbers = [int(word) for word in problem.question.replace(".", " ").split() if word.isdigit()]
        value = numbers.pop(0)
        for line in problem.lines:
            left, operation, right, equals, result = line.split()
            assert (int(left), int(right), equals) == (value, numbers.pop(0), "=")
            value = OPERATIONS[operation](value, int(right))
            assert value == int(result) >= 1
        assert numbers == []
        assert problem.answer == value
        assert len(problem.lines) in LEVELS[level].steps
        assert get_task("arithmetic").solution(problem) == "\n".join([*problem.lines, f"#### {value}"])


def test_arithmetic_sentences_mean_their_operation() -> None:
    words = {"+": {"more"}, "-": {"loses", "gives away", "sells", "takes"}, "*": {"each", "Each", "packs"}}
    for problem in draw_problems("train", LEVELS["wp1"], 200, seed=4):
        operation = problem.lines[0].split()[1]
        meant = {op for op, marks in words.items() if any(mark in problem.question for mark in marks)}
        assert meant == {operation}, problem.question


def test_arithmetic_sets_share_no_problem_whatever_their_seeds() -> None:
    for level in LEVELS.values():
        keys = {
            split: {problem.key for seed in (0, 1) for problem in draw_problems(split, level, 60, seed)}
            for split in ("train", "test", "examples")
        }
        assert keys["train"].isdisjoint(keys["test"])
        assert keys["train"].isdisjoint(keys["examples"])
        assert keys["test"].isdisjoint(keys["examples"])


def test_arithmetic_key_ignores_names_and_things() -> None:
    by_key: dict[str, set[str]] = {}
    rng = random.Random(0)
    for _ in range(3000):
        problem = make_problem(rng, LEVELS["wp1"])
        by_key.setdefault(problem.key, set()).add(problem.question)
        assert not any(name in problem.key for name in ("Tom", "Anna", "apples", "coins"))
    assert max(map(len, by_key.values())) > 1  # the same problem did come up with other names


def test_arithmetic_split_shares() -> None:
    splits = [split_of(f"problem {i}") for i in range(8000)]
    assert splits.count("test") / 8000 == pytest.approx(7 / 32, abs=0.02)
    assert splits.count("examples") / 8000 == pytest.approx(1 / 32, abs=0.01)


def test_arithmetic_is_seeded() -> None:
    first, again, other = (
        get_task("arithmetic", seed=seed, train_size=40, test_size=20) for seed in (5, 5, 6)
    )
    assert first.train().to_list() == again.train().to_list()
    assert first.test().to_list() == again.test().to_list()
    assert questions(first.train()) != questions(other.train())
    assert first.train()[0]["prompt"][:3] == other.train()[0]["prompt"][:3]  # runs share the example


def test_arithmetic_prompt_is_a_one_shot_chat_in_the_format_the_reward_expects() -> None:
    task = get_task("arithmetic", train_size=30, test_size=10)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (30, 10)
    assert len(set(questions(train))) == 30
    assert set(questions(train)).isdisjoint(questions(test))
    for row in train:
        system, example, solution, question = row["prompt"]
        assert [m["role"] for m in row["prompt"]] == ["system", "user", "assistant", "user"]
        assert "####" in system["content"]
        assert task.format.followed(solution["content"])
        assert example["content"] not in questions(train)
        assert question["content"].endswith("?")
    accuracy, form = task.rewards
    solved = f"1 + 1 = 2\n#### {train[0]['answer']}"
    wrong = f"1 + 1 = 2\n#### {int(train[0]['answer']) + 1}"
    prompts = [train[0]["prompt"]] * 3
    completions = [messages([("assistant", text)]) for text in (solved, wrong, train[0]["answer"])]
    answers = [train[0]["answer"]] * 3
    assert accuracy(prompts=prompts, completions=completions, answer=answers) == [1.0, 0.0, 0.0]
    assert form(prompts=prompts, completions=completions, answer=answers) == [0.1, 0.1, 0.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": "wp3"}, "Arithmetic level 'wp3' is unknown; use one of: wp1,"),
        ({"examples": -1}, "examples is -1; it must be 0 or more"),
        ({"levle": "wp1"}, "Task arithmetic has no option 'levle' .did you mean 'level'"),
    ],
)
def test_arithmetic_refuses_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task("arithmetic", **options)


def test_arithmetic_says_when_a_level_has_too_few_problems() -> None:
    with pytest.raises(QeRLError, match="Only 0 of 5 arithmetic examples problems"):
        draw_problems("examples", Level((1,), 3), 5, seed=0, operations=("-",))  # "3 - 2" alone
