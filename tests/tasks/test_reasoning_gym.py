"""Tasks of the package reasoning-gym: rows, difficulty, its scores, and what its scorers are not given."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from qerl.errors import QeRLError
from qerl.tasks import get_task
from qerl.tasks.reasoning_gym import EVALUATED
from qerl.tasks.together import guarded
from tests.support.tasks import questions

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the package reasoning-gym"
)
EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
SIZES = {"train_size": 30, "test_size": 10}


@pytest.mark.slow
@needs_package
def test_rows_are_problems_of_the_difficulty_in_the_format_that_is_rewarded() -> None:
    task = get_task("reasoning_gym:chain_sum", **EASY, **SIZES)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (30, 10)
    assert set(questions(train)).isdisjoint(questions(test))
    for row in train:
        assert re.search(r"\d\d [-+] \d\d =", row["prompt"][-1]["content"])
        assert "<answer>" in row["prompt"][0]["content"]
    row = train[0]
    stated = [f"<think>t</think><answer>{a}</answer>" for a in (row["answer"], int(row["answer"]) + 1)]
    columns = {name: [row[name]] * 2 for name in ("answer", "index")}
    accuracy, form, _ = (guarded(reward) for reward in task.rewards)
    right, wrong = accuracy(prompts=[row["prompt"]] * 2, completions=stated, **columns)
    assert right == 1.0 > wrong
    assert form(prompts=[row["prompt"]] * 2, completions=stated, **columns) == [0.1, 0.1]
    assert accuracy(prompts=[""], completions=["no tags"], answer=["1"], index=[0]) == [0.0]


@needs_package
def test_a_wrong_answer_with_credit_is_not_accurate() -> None:
    task = get_task("reasoning_gym:countdown", train_size=1, test_size=1)
    (row,) = task.train()
    said = [f"<answer>{answer}</answer>" for answer in (row["answer"], "1 + 1")]
    columns = {"prompts": [""] * 2, "completions": said, "answer": [""] * 2, "index": [row["index"]] * 2}
    accuracy, _, score = task.rewards
    assert accuracy(**columns) == [1.0, 0.0]
    assert score(**columns)[0] == 1.0 and 0.0 < score(**columns)[1] < 1.0


@needs_package
def test_problems_follow_from_the_seed_and_held_out_ones_from_their_text() -> None:
    first, again, other = (get_task("reasoning_gym:chain_sum", seed=s, **SIZES) for s in (5, 5, 6))
    assert first.train().to_list() == again.train().to_list()
    assert set(questions(first.train())) != set(questions(other.train()))
    assert set(questions(first.train())).isdisjoint(questions(other.test()))


@needs_package
@pytest.mark.parametrize(
    "name", ["countdown", "spiral_matrix", "polynomial_equations", "knights_knaves", "sudoku"]
)
def test_a_generators_own_answer_has_its_full_score(name: str) -> None:
    task = get_task(f"reasoning_gym:{name}", train_size=2, test_size=1)
    for row in task.train():
        assert task.score(row["answer"], row["index"]) == 1.0
        assert task.score("", row["index"]) < 1.0


@needs_package
def test_a_scorer_that_evaluates_answers_is_not_given_code(tmp_path: Path) -> None:
    task = get_task("reasoning_gym:spiral_matrix", train_size=1, test_size=1)
    (row,) = task.train()
    witness = tmp_path / "ran"
    assert task.score(f"[open({str(witness)!r}, 'w')]", row["index"]) == 0.0
    assert task.score("entry['answer'].split()", row["index"]) == 0.0
    assert not witness.exists()


@needs_package
def test_every_scorer_of_the_package_that_evaluates_answers_is_known() -> None:
    import inspect

    from reasoning_gym.factory import DATASETS

    evaluates = re.compile(
        r"(?<![\w.])(?:eval|exec|(?:sympy\.|sp\.)?(?:parse_expr|sympify))\(\s*(?:user_)?answer"
    )
    found = {
        name for name, (cls, _) in DATASETS.items() if evaluates.search(inspect.getsource(cls.score_answer))
    }
    assert found == set(EVALUATED)


@needs_package
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("chain_sums", {}, "reasoning-gym has no generator 'chain_sums'; it has: .*chain_sum"),
        ("chain_sum", {"digits": 2}, "has no option 'digits'; its options are .*min_digits"),
        ("chain_sum", {"min_terms": 0}, "refuses its options: min_terms must be positive"),
        ("chain_sum", {"min_terms": "two"}, "refuses its options"),
        ("chain_sum", {"answer_format": "loud"}, "Answer format 'loud' is unknown"),
    ],
)
def test_bad_names_and_options_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task(f"reasoning_gym:{name}", **options)


@needs_package
def test_a_difficulty_with_too_few_problems_is_refused() -> None:
    options = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(QeRLError, match=r"only \d+ training problems of .* make it harder"):
        get_task("reasoning_gym:chain_sum", **options, **SIZES).train()


def test_a_missing_package_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(QeRLError, match="need the package reasoning-gym; run `pip install 'reasoning-gym"):
        get_task("reasoning_gym:chain_sum")
