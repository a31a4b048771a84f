"""Problems of the user's own: a file with one JSON object per line."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl.errors import QeRLError
from qerl.tasks import get_task
from tests.support.tasks import messages, questions


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """``jsonl(row, ...)`` writes a file, a row or a raw line each, and gives the task's name."""

    def write(*rows: Any, name: str = "data.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n" * bool(lines), encoding="utf-8")
        return f"jsonl:{tmp_path / name}"

    return write


def test_jsonl_takes_text_and_messages(jsonl) -> None:
    chat = messages([("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?")])
    own = messages([("system", "Use tags."), ("user", "3 + 3?")])
    spec = jsonl(
        {"question": "7 x 6?", "answer": 42, "difficulty": 3},
        "",
        {"prompt": "7 / 2?", "answer": 3.5},
        {"messages": chat, "answer": " 4 "},
        {"prompt": own, "answer": 1e-7},
    )
    task = get_task(spec, answer_format="hashes")
    rows = task.train().to_list()
    instruction = messages([("system", task.format.instruction)])
    assert [row["prompt"] for row in rows] == [
        instruction + messages([("user", "7 x 6?")]),
        instruction + messages([("user", "7 / 2?")]),
        instruction + chat,
        own,
    ]
    assert [row["answer"] for row in rows] == ["42", "3.5", "4", "0.0000001"]
    assert [row["difficulty"] for row in rows] == [3, None, None, None]
    assert set(rows[0]) == {"prompt", "answer", "difficulty"}
    assert "####" in instruction[0]["content"]
    assert r"\boxed{}" in get_task(spec).train()[0]["prompt"][0]["content"]


def test_a_path_in_jsonl_is_a_task_by_itself(jsonl) -> None:
    spec = jsonl({"question": "7 x 6?", "answer": 42})
    task = get_task(spec.removeprefix("jsonl:"), answer_format="hashes")
    assert task.name == spec and task.train()["answer"] == ["42"]


def test_jsonl_keeps_columns_that_only_later_lines_have(jsonl) -> None:
    spec = jsonl({"question": "a?", "answer": "1"}, {"question": "b?", "answer": "2", "source": "book"})
    assert get_task(spec).train()["source"] == [None, "book"]


GOOD = {"question": "fine?", "answer": "yes"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "x"', "this is not JSON"),
        ('["x", "y"]', "must be a JSON object"),
        (
            {"text": "x", "answer": "1"},
            "exactly one of the columns prompt, question, messages; this has text, answer",
        ),
        ({"prompt": "x", "question": "y", "answer": "1"}, "this has prompt and question"),
        ({"question": " ", "answer": "1"}, "the problem is empty"),
        ({"question": 7, "answer": "1"}, "must be text, or a list of messages"),
        ({"messages": [{"role": "human", "content": "x"}], "answer": "1"}, "one of the roles system, user"),
        ({"messages": [{"role": "user"}], "answer": "1"}, r"a message without content \(role user\)"),
        (
            {"messages": [{"role": "user", "content": "x", "name": "Ann"}], "answer": "1"},
            r"the problem has a message with name \(role user\), but only role and content",
        ),
        ({"messages": messages([("assistant", "x")]), "answer": "1"}, "the last message must be the user's"),
        ({"messages": [], "answer": "1"}, "the last message must be the user's"),
        ({"question": "x"}, "answer must be text or a number; it is null"),
        ({"question": "x", "answer": ""}, 'answer must be text or a number; it is ""'),
        ({"question": "x", "answer": True}, "it is true"),
        ('{"question": "x", "answer": NaN}', "it is NaN"),
        ({"question": "x", "answer": ["1"]}, "it is .*1"),
        (
            {"question": "x", "answer": "1", "completions": 3},
            "the column completions has a name that TRL uses",
        ),
        ({"question": "x", "answer": "1", "log_metric": 3}, "the column log_metric has a name"),
        ({"question": "x", "answer": "1", "images": []}, "the column images has a name"),
        ({"question": "half \ud83d", "answer": "1"}, "lone surrogate .*ud83d"),
        ({"question": "x", "answer": "1", "note": {"deep": ["\udc00"]}}, "half of a character"),
        ('{"question": "x", "answer": 1e999}', "it is Infinity"),
        ('{"question": "x", "answer": ' + "[" * 100_000 + "}", "this is not JSON"),
        ('{"question": "x", "answer": ' + "9" * 5000 + "}", "this is not JSON .*4300 digits"),
    ],
)
def test_jsonl_errors_name_file_and_line(jsonl, line: Any, said: str) -> None:
    with pytest.raises(QeRLError, match=rf"data\.jsonl, line 3: .*{said}"):
        get_task(jsonl(GOOD, "", line, GOOD)).train()


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_what_can_be_read_only_once_or_without_end_is_no_file_of_problems(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(QeRLError, match="is a pipe or a device, and a task is read more than once"):
        get_task(f"jsonl:{tmp_path / name}").train()


@pytest.mark.parametrize(
    ("name", "said"), [("n" * 300, "too long"), ("a\0b", "null byte"), ("", "directory")]
)
def test_a_name_that_no_file_can_have_is_said(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(QeRLError, match=rf"(?s)The data file .* cannot be read \(.*{said}"):
        get_task(f"jsonl:{tmp_path / name}").train()


def test_jsonl_refuses_files_without_problems(jsonl, tmp_path: Path) -> None:
    with pytest.raises(QeRLError, match=r"data\.jsonl has no problems"):
        get_task(jsonl()).train()
    with pytest.raises(
        QeRLError, match=r"The data file .*missing\.jsonl cannot be read \(No such file.*check the path"
    ):
        get_task(f"jsonl:{tmp_path / 'missing.jsonl'}").train()
    (tmp_path / "latin.jsonl").write_bytes('{"question": "où?", "answer": "là"}\n'.encode("latin-1"))
    with pytest.raises(QeRLError, match=r"latin\.jsonl, line 1: this is not JSON"):
        get_task(f"jsonl:{tmp_path / 'latin.jsonl'}").train()


def test_a_file_that_is_missing_is_said_before_what_its_options_lack(tmp_path: Path) -> None:
    with pytest.raises(QeRLError, match=r"missing\.jsonl cannot be read"):
        get_task(f"jsonl:{tmp_path / 'missing.jsonl'}").test()


def test_an_option_of_a_recipe_for_another_task_can_be_dropped() -> None:
    with pytest.raises(QeRLError, match=r"no option 'level'.*--task_options '\{\}' drops those of a recipe"):
        get_task("jsonl:my/problems.jsonl", level="wp1")


def test_jsonl_refuses_a_column_of_several_types(jsonl) -> None:
    rows = [GOOD | {"level": 3}, GOOD | {"level": "hard"}]
    with pytest.raises(QeRLError, match=r"data\.jsonl has a column of values of different types"):
        get_task(jsonl(*rows)).train()


def test_jsonl_takes_long_numbers_as_answers_and_refuses_them_in_other_columns(jsonl) -> None:
    assert get_task(jsonl({"question": "x", "answer": 10**400})).train()[0]["answer"] == "1" + "0" * 400
    with pytest.raises(QeRLError, match=r"too large a number .*text for numbers beyond 64 bits"):
        get_task(jsonl(GOOD | {"seen": 10**30})).train()


def test_jsonl_holds_out_the_same_problems_in_any_order(jsonl) -> None:
    rows = [{"question": f"{i}?", "answer": i} for i in range(20)] + [{"question": "3?", "answer": 3}]
    task = get_task(jsonl(*rows), test_size=6)
    train, test = questions(task.train()), questions(task.test())
    assert len(set(test)) == 6
    assert set(train).isdisjoint(test)
    assert sorted(train + test) == sorted(row["question"] for row in rows)
    shuffled = get_task(jsonl(*reversed(rows), name="reversed.jsonl"), test_size=6)
    assert set(questions(shuffled.test())) == set(test)
    larger = get_task(jsonl(*rows), test_size=7)
    assert set(test) < set(questions(larger.test()))


def test_jsonl_takes_held_out_problems_from_a_second_file(jsonl, tmp_path: Path) -> None:
    jsonl({"question": "held out?", "answer": "yes"}, name="test.jsonl")
    task = get_task(jsonl(GOOD), test_path=str(tmp_path / "test.jsonl"))
    assert questions(task.train()) == ["fine?"]
    assert questions(task.test()) == ["held out?"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "has no held-out problems; set test_size in task_options, or name a second file"),
        ({"test_size": 2}, "test_size 2 leaves no training problem of the 2 different ones"),
        ({"test_size": -1}, "test_size is -1"),
        ({"test_size": 0.5}, "test_size is 0.5"),
        ({"test_size": 1, "test_path": "x"}, "give one of them"),
        ({"answer_format": "boxd"}, "Answer format 'boxd' is unknown"),
        ({"test_sise": 1}, r"has no option 'test_sise' \(did you mean 'test_size'"),
    ],
)
def test_jsonl_refuses_bad_options(jsonl, options: dict[str, Any], said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task(jsonl(GOOD, {"question": "other?", "answer": 1}), **options).test()
