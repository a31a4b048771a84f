"""Demonstrations of tasks: reference solutions of problems, and conversations of a file or of the Hub."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.tasks import demonstrations, get_task, hub

SAID = {"role": "assistant", "content": "Hello."}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("form", [None, "boxed"])
def test_solutions_of_word_problems_are_right_and_in_form(held_out, form):
    options = {"answer_format": form} if form else {}
    task = get_task("arithmetic", level="wp2", train_size=16, test_size=8, **options)
    rows, problems = task.demonstrations(held_out), task.test() if held_out else task.train()
    assert rows.remove_columns("completion").to_list() == problems.to_list()
    rewards = {reward.__name__: reward for reward in task.rewards}
    columns = {"prompts": rows["prompt"], "completions": rows["completion"], "answer": rows["answer"]}
    assert rewards["accuracy"](**columns, steps=rows["steps"], log_metric=None) == [1.0] * len(rows)
    assert rewards["format"](**columns) == [0.1] * len(rows)


def test_solutions_of_gsm8k_lose_the_calculators_marks(monkeypatch):
    stated = "2+2=<<2+2=4>>4\nSo it is <<4*1=4>>4.\n#### 1,004"
    data = Dataset.from_list([{"question": "Two and two?", "answer": stated}])
    monkeypatch.setattr(hub, "part_of", lambda *where: data)
    (row,) = get_task("gsm8k").demonstrations()
    assert row["completion"] == [{"role": "assistant", "content": "2+2=4\nSo it is 4.\n#### 1,004"}]
    (row,) = get_task("gsm8k", answer_format="boxed").demonstrations(held_out=True)
    assert row["completion"][0]["content"] == "2+2=4\nSo it is 4.\n\\boxed{1,004}"
    with pytest.raises(QeRLError, match="Task math500 has no reference solutions"):
        get_task("math500").demonstrations(held_out=True)


def test_a_file_of_problems_may_have_completions_which_rl_never_sees(tmp_path):
    solved = [{"question": f"{n} + 1?", "answer": n + 1, "completion": f"#### {n + 1}"} for n in range(8)]
    path = lines(tmp_path / "solved.jsonl", *solved)
    task = get_task(str(path), test_size=2)
    assert set(task.train().column_names) == {"prompt", "answer"}
    for held_out, problems in ((False, task.train()), (True, task.test())):
        rows = task.demonstrations(held_out)
        assert rows.remove_columns("completion").to_list() == problems.to_list()
        assert [r["completion"][0]["content"] for r in rows] == [f"#### {r['answer']}" for r in rows]
    with pytest.raises(QeRLError, match=r"line 2: algorithm: sft learns from the column completion"):
        get_task(str(lines(path, solved[0], {"question": "2?", "answer": 2}))).demonstrations()


def test_a_mixture_has_those_of_its_tasks():
    words = {"task": "arithmetic", "task_options": {"train_size": 3, "test_size": 2}}
    rows = get_task("mixture", a=words, b=words).demonstrations(held_out=True)
    assert rows["task"] == ["a", "b", "a", "b"] and all(rows["completion"])


def test_conversations_of_a_file(tmp_path):
    pair = {"prompt": [CHAT["messages"][0]], "completion": "Hello.", "extra": 1}
    text = {"prompt": "The sky is", "completion": " blue."}
    other = {"messages": [CHAT["messages"][0] | {"content": "Ho"}, SAID]}
    task = get_task(f"demonstrations:{lines(tmp_path / 'held.jsonl', CHAT, other)}", test_size=1)
    assert len(task.demonstrations()) == len(task.demonstrations(held_out=True)) == 1
    every = get_task(f"demonstrations:{lines(tmp_path / 'a.jsonl', CHAT, pair)}").demonstrations().to_list()
    assert every[0]["messages"] == CHAT["messages"] == [*every[1]["prompt"], *every[1]["completion"]]
    (row,) = get_task(f"demonstrations:{lines(tmp_path / 'b.jsonl', text)}").demonstrations()
    assert row == text
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]
    joined = {"messages": [CHAT["messages"][0], SAID | {"content": parts, "tool_calls": None}]}
    (row,) = get_task(f"demonstrations:{lines(tmp_path / 'c.jsonl', joined)}").demonstrations()
    assert row == CHAT
    assert task.rewards == []
    with pytest.raises(QeRLError, match=r"no answers that could be rewarded.*algorithm: sft"):
        task.train()


def test_several_answers_to_a_conversation_are_held_out_together(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": answer}]}
        for n in range(8)
        for answer in ("Hello.", "Yes?", "Hey.")
    ]
    task = get_task(f"demonstrations:{lines(tmp_path / 'a.jsonl', *rows)}", test_size=3)
    asked = [
        {row["messages"][0]["content"] for row in task.demonstrations(held_out)} for held_out in (True, False)
    ]
    assert list(map(len, asked)) == [3, 5] and asked[0].isdisjoint(asked[1])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": CHAT["messages"][:1]}, "the last message must be the assistant's"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "one of the roles system, user, assistant"),
        ({"text": "The sky is blue."}, "needs the column messages, or prompt and completion.*this has text"),
        ({"prompt": [CHAT["messages"][0]]}, "the column completion, which is missing"),
        ({"prompt": "The sky", "completion": []}, "needs the column messages, or prompt and completion"),
        (
            {"messages": [CHAT["messages"][0], SAID | {"content": "", "tool_calls": [{"name": "f"}]}]},
            r"messages has a message with tool_calls \(role assistant\), but only role and content are read",
        ),
        (
            {"prompt": [CHAT["messages"][0]], "completion": [SAID | {"reasoning_content": "Hm."}]},
            r"the completion has a message with reasoning_content",
        ),
        ({"messages": [CHAT["messages"][0], {"role": "assistant"}]}, r"without content \(role assistant\)"),
        (CHAT | {"tools": [{"name": "f"}]}, "not rendered with the column tools"),
        (CHAT | {"chat_template_kwargs": {"a": 1}}, "not rendered with the column chat_template_kwargs"),
    ],
)
def test_what_is_no_demonstration_is_refused_by_its_line(tmp_path, row, said):
    task = get_task(f"demonstrations:{lines(tmp_path / 'a.jsonl', CHAT, row)}")
    with pytest.raises(QeRLError, match=f"line 2: .*{said}"):
        task.demonstrations()


def test_conversations_of_the_hub(monkeypatch):
    asked = []

    def part_of(*where: object) -> Dataset:
        asked.append(where[:3])
        return Dataset.from_list([CHAT, CHAT])

    monkeypatch.setattr(demonstrations, "part_of", part_of)
    task = get_task("demonstrations:some/chats", split="train_sft", test_path="test_sft", config="data")
    assert task.on_hub and task.demonstrations()["messages"] == [CHAT["messages"]] * 2
    task.demonstrations(held_out=True)
    assert asked == [("some/chats", "data", "train_sft"), ("some/chats", "data", "test_sft")]
