"""Programs earn their reward by passing tests."""

import json
from pathlib import Path

import pytest

from qerl.errors import QeRLError
from qerl.rewards import sandbox
from qerl.rewards.code_tests import CodeTest, read_tests, share_passed
from qerl.rewards.sandbox import Limits
from qerl.tasks import code, get_task
from qerl.tasks.code import passes_tests
from qerl.tasks.together import guarded
from tests.support.sandbox import needs_sandbox

SUM = [{"stdin": "3 4", "stdout": "7"}, {"stdin": "1 1", "stdout": "2"}]
RIGHT = "print(sum(map(int, input().split())))"
ROWS = [
    {"question": "Print the sum of two numbers.", "tests": SUM},
    {
        "question": "Write add(a, b).",
        "tests": ["assert add(3, 4) == 7", "assert add(0, 0) == 0"],
        "answer": "x",
    },
]


def block(program: str) -> str:
    return f"This adds them:\n```python\n{program}\n```\nDone."


@pytest.fixture
def problems(tmp_path: Path) -> str:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"code:{path}"


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "share"),
    [
        (RIGHT, 1.0),
        ("print(7)", 0.5),
        ("input()\nprint('7 \\n\\n')", 0.5),  # spaces at the ends do not count
        ("print(8)", 0.0),
        ("print(7)\nraise SystemExit(3)", 0.0),
        ("print('7', end='')\nimport os\nos.kill(os.getpid(), 11)", 0.0),
    ],
)
def test_a_program_earns_the_share_of_tests_that_it_passes_or_all_or_nothing(program, share):
    tests = read_tests(SUM)
    assert share_passed(program, tests, Limits(), only_all=False) == share
    assert share_passed(program, tests, Limits(), only_all=True) == float(share == 1)


@needs_sandbox
@pytest.mark.parametrize("between", ["\f", "\v", "\x1c", "\x85", "\u2028", "\r"])
def test_only_a_newline_begins_a_line_of_output(between):
    tests = [CodeTest(stdout="1\n2")]
    assert share_passed(f"print('1' + {between!r} + '2')", tests, Limits(), only_all=True) == 0
    assert share_passed("print('1\\r\\n2')", tests, Limits(), only_all=True) == 1


def test_programs_at_the_same_time_fit_into_the_memory_that_is_left(monkeypatch):
    most = Limits(memory_mb=1000).most_mb * 2**20
    monkeypatch.setattr(code.os, "sched_getaffinity", lambda _: range(64))
    for left, at_once in ((None, 64), (1, 1), (3.5 * most, 3), (99 * most, 64)):
        monkeypatch.setattr(code, "host_bytes", lambda _, left=left: left)
        assert code._at_once(Limits(memory_mb=1000)) == at_once


@needs_sandbox
def test_statements_run_after_the_program():
    tests = read_tests(["assert add(3, 4) == 7", {"check": "assert add(0, 1) == 1"}])
    assert share_passed("def add(a, b):\n    return a + b", tests, Limits(), only_all=True) == 1
    assert share_passed("def add(a, b):\n    return 7", tests, Limits(), only_all=False) == 0.5
    assert share_passed("raise SystemExit", tests, Limits(), only_all=False) == 0


@needs_sandbox
def test_a_program_that_hangs_is_not_run_again():
    tests = [CodeTest(stdout="7")] * 50
    assert share_passed("while True: pass", tests, Limits(seconds=0.3), only_all=False) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "assert x",
        [""],
        [3],
        [{}],
        [{"stdin": "1"}],
        [{"stdout": 7}],
        [{"stdout": "7", "check": "a"}],
    ],
)
def test_what_is_no_test_is_refused(wrong):
    with pytest.raises(ValueError, match=r"tests? must be"):
        read_tests(wrong)


@needs_sandbox
def test_the_task_asks_for_a_program_and_judges_it(problems):
    task = get_task(problems)
    rows = task.train()
    assert "```python" in rows[0]["prompt"][0]["content"]
    accuracy, form = (guarded(reward) for reward in task.rewards)
    assert (accuracy.__name__, form.__name__) == ("accuracy", "format")
    completions = [block(RIGHT), block("def add(a, b):\n    return a + b"), "no program", block("1 / 0")]
    columns = {name: [rows[i][name] for i in (0, 1, 0, 1)] for name in ("tests", "answer")}
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    assert accuracy(prompts=["p"] * 4, completions=messages, **columns) == [1.0, 1.0, 0.0, 0.0]
    assert accuracy.last.failed == 0
    assert form(prompts=["p"] * 4, completions=messages, **columns) == [0.1, 0.1, 0.0, 0.1]
    assert rows["answer"] == ["", "x"]


@needs_sandbox
def test_a_share_of_the_tests_is_not_called_accuracy(problems):
    task = get_task(problems, share_of_tests=True, seconds=2)
    reward = guarded(task.rewards[0])
    assert reward.__name__ == "tests_passed"
    row = task.train()[0]
    assert reward(prompts=["p"], completions=[block("print(7)")], tests=[row["tests"]]) == [0.5]


@needs_sandbox
def test_programs_that_take_longer_than_the_limit_of_rewards_are_judged_by_their_own():
    reward = guarded(passes_tests(limits=Limits(seconds=5)), timeout_s=0.1)
    slow = block("import time\ntime.sleep(0.5)\nprint(7)")
    tests = [[{"stdout": "7"}], [{"stdout": "8"}]]
    assert reward(prompts=["p"] * 2, completions=[slow] * 2, tests=tests) == [1.0, 0.0]


@needs_sandbox
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"question": "Add."}, r"line 1: tests must be a list with at least one test"),
        ({"question": "Add.", "tests": [{"stdin": "1"}]}, r"line 1: a test must be Python statements"),
        ({"question": "Add.", "tests": ["assert 1"], "answer": 3}, r"the column answer, .* must be text"),
    ],
)
def test_a_line_without_tests_stops_the_run_before_it_starts(tmp_path, line, said):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(QeRLError, match=said):
        get_task(f"code:{path}").train()


def test_a_machine_without_a_sandbox_cannot_have_the_task(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "obstacle", lambda: "There is no sandbox.")
    with pytest.raises(QeRLError, match=r"There is no sandbox\."):
        get_task(f"code:{tmp_path / 'problems.jsonl'}")
    with pytest.raises(QeRLError, match=r"There is no sandbox\."):
        passes_tests()
