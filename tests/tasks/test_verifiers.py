"""Task sets of verifiers, against the real package: rows, their own rewards, and what is refused."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from qerl.errors import QeRLError
from qerl.tasks import get_task
from tests.support.tasks import questions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="needs the package verifiers"
)

TASKSET = """
import itertools

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) == trace.last_reply)

    @vf.reward(weight=0.5)
    async def polite(self, trace: vf.Trace) -> float:
        return float("please" in trace.last_reply)
{more}

class SumConfig(vf.TasksetConfig):
    first: int = 0


class SumSet(vf.Taskset[SumTask, SumConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count(self.config.first):
            data = SumData(prompt=f"{{i}}+{{i}}=?", answer=2 * i, system_prompt="Add.")
            yield SumTask(data, self.config.task)


__all__ = ["SumSet"]
"""


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, more: str = "") -> str:
        (tmp_path / f"{name}.py").write_text(TASKSET.format(more=more))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return f"verifiers:{name}"

    return make


def test_a_task_set_gives_rows_and_judges_answers_by_its_own_rewards(taskset) -> None:
    task = get_task(taskset("toy_sums"), limit=80, first=10)
    train, test = task.train(), task.test()
    assert len(train) + len(test) == 80 and len(test) >= 3
    assert set(questions(train)).isdisjoint(questions(test))
    row = train[0]
    assert row["prompt"][0] == {"role": "system", "content": "Add."}
    first, second = map(int, row["prompt"][1]["content"].removesuffix("=?").split("+"))
    assert first + second == int(row["answer"]) and first >= 10
    (accuracy,) = task.rewards
    as_chat = [{"role": "assistant", "content": row["answer"]}]
    said = [row["answer"], f"{row['answer']} please", "please", as_chat]
    scores = accuracy(prompts=[row["prompt"]] * 4, completions=said, index=[row["index"]] * 4)
    assert scores == [1.0, 0.5, 0.5, 1.0]


def test_a_system_prompt_of_the_users_own_takes_the_place_of_the_task_sets(taskset) -> None:
    row = get_task(taskset("toy_asked"), limit=20, system_prompt="Sum up.").train()[0]
    assert row["prompt"][0]["content"] == "Sum up."
    with pytest.raises(QeRLError, match="is judged by rewards of its own; remove answer_format"):
        get_task(taskset("toy_asked"), answer_format="boxed")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("    NEEDS_CONTAINER = True\n", "needs a container"),
        (
            "    @vf.reward\n    async def files(self, runtime) -> float:\n        return 0.0\n",
            "the reward files, which reads the agent's machine",
        ),
        ("    @classmethod\n    def toolsets(cls, config):\n        return [1]\n", "brings tool servers"),
    ],
)
def test_tasks_that_need_more_than_an_answer_are_refused(taskset, more: str, said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task(taskset(f"toy_{len(more)}", more), limit=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first": "ten"}, "refuses first: Input should be"),
        ({"last": 3}, "refuses last"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_a_wrong_configuration_is_refused(taskset, options: dict[str, Any], said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_task(taskset("toy_configured"), **options)


def test_a_task_set_that_is_not_installed_is_refused() -> None:
    with pytest.raises(
        QeRLError, match=r"The task set no-such-set cannot be loaded \(.*not found.*\); check its name"
    ):
        get_task("verifiers:no-such-set")
