"""Evaluation in several turns: with tools or an environment, as the policy was trained."""

import json
import re

import pytest
from rich.console import Console

from qerl.errors import QeRLError
from qerl.eval.evaluate import evaluate, held_out
from qerl.eval.record import Record
from qerl.eval.sampling import conversations_of
from qerl.rollout.engine import SamplingParams
from qerl.tasks import get_task
from tests.support.agents import SayingEngine, call, tool_tokenizer

QUIET = Console(quiet=True)
DEFAULTS = {
    "tools": (), "environment": None, "environment_options": {}, "tool_timeout": 5.0, "tool_errors": "text",
    "tool_output_limit": 100, "max_tool_calling_iterations": None,
}  # fmt: skip


@pytest.fixture
def task():
    return get_task("arithmetic", level="wp1-99x99", examples=0, test_size=4)


def score(task, tokenizer, say, record=None, samples=1, max_tokens=200, **settings):
    engine = SayingEngine(tokenizer, say)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=(tokenizer.eos_token_id,))
    with conversations_of(tokenizer, {}, **(DEFAULTS | settings)) as conversations:
        return evaluate(
            engine, tokenizer, task, held_out(task), samples=samples, params=params, console=QUIET,
            record=record, conversations=conversations,
        )  # fmt: skip


def reads_the_answer(row, so_far):
    """Asks the calculator, and then states what it has answered."""
    told = re.search(r"user\s*(\d+)", so_far)
    return f"#### {told[1]}" if told else "12 * 12 ="


def test_an_environment_answers_and_what_it_says_is_no_token_of_the_policy(task, tiny_tokenizer, tmp_path):
    record = Record(tmp_path / "e", {})
    result = score(task, tiny_tokenizer, reads_the_answer, record, environment="calculator")
    rows = [json.loads(line) for line in (tmp_path / "e" / "completions.jsonl").read_text().splitlines()]
    roles = [message["role"] for message in rows[0]["completion"]]
    assert roles == ["assistant", "user", "assistant"]
    assert rows[0]["completion"][1]["content"] == "144"
    assert [row["answer"] for row in rows] == ["144"] * 4
    assert result.accuracy == sum(answer == "144" for answer in task.test()["answer"]) / 4
    drawn = sum(len(tiny_tokenizer(text)["input_ids"]) + 1 for text in ("12 * 12 =", "#### 144"))
    assert result.mean_tokens == drawn and rows[0]["finish_reason"] == "stop"


def test_a_policy_that_states_the_right_answer_after_its_turns_is_right(task, tiny_tokenizer):
    answers = task.test()["answer"]

    def say(row, so_far):
        return f"#### {answers[row.prompt_number]}" if "4" in so_far else "2 + 2 ="

    assert score(task, tiny_tokenizer, say, samples=2, environment="calculator").accuracy == 1.0


def test_tools_are_told_of_in_the_prompt_and_called(task):
    tokenizer, prompts = tool_tokenizer(), []

    def say(row, so_far):
        prompts.append(tokenizer.decode(row.prompt))
        return call("calculator", expression='"6 * 7"') if not so_far else "#### 42"

    result = score(task, tokenizer, say, tools=("calculator",), max_tokens=2000)
    assert result.answered == 1.0
    assert "calculator" in prompts[0] and "Compute the value" in prompts[0]


def test_what_an_environment_says_first_is_in_the_prompt(task, tiny_tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, word):\n        self.word = word\n"
        "    def reset(self, answer, **row):\n        return f' {self.word}: {answer}\\ud800'\n"
        "    def respond(self, text):\n        return None\n"
    )
    told = []

    def say(row, so_far):
        told.append(tiny_tokenizer.decode(row.prompt))
        return f"#### {task.test()['answer'][row.prompt_number]}"

    settings = {"environment": f"{tmp_path}/mine.py:Mine", "environment_options": {"word": "Psst"}}
    assert score(task, tiny_tokenizer, say, **settings).accuracy == 1.0
    assert all(f"Psst: {answer}" in text for text, answer in zip(told, task.test()["answer"], strict=True))


def test_an_environment_that_only_begins_episodes_is_answered_in_one_turn(task, tmp_path):
    """As in training: what it says is in the prompt, and a call that the model writes is text."""
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def reset(self, answer, **row):\n        return f' Psst: {answer}'\n"
    )
    tokenizer, told, record = tool_tokenizer(), [], Record(None, {})

    def say(row, so_far):
        assert not so_far
        told.append(tokenizer.decode(row.prompt))
        return call("multiply", a=1, b=2) + f"#### {task.test()['answer'][row.prompt_number]}"

    settings = {"environment": f"{tmp_path}/mine.py:Mine", "max_tokens": 2000}
    assert score(task, tokenizer, say, record, **settings).accuracy == 1.0
    answers = task.test()["answer"]
    assert all(f"Psst: {answer}" in text for text, answer in zip(told, answers, strict=True))
    assert [[message["role"] for message in row["completion"]] for row in record.rows] == [["assistant"]] * 4


def test_each_sample_answers_what_it_was_shown(task, tiny_tokenizer, tmp_path):
    """Where an environment shows the samples of a problem different things."""
    (tmp_path / "mine.py").write_text(
        "from itertools import count\n\nepisodes = count()\n\n\n"
        "class Mine:\n"
        "    def reset(self, **row):\n"
        "        self.own = next(episodes)\n"
        "        return f' secret {self.own} '\n"
        "    def respond(self, text):\n        return None if f'secret {self.own} ' in text else 'wrong'\n"
        "    def close(self):\n        print('closed', self.own)\n"
    )
    record = Record(tmp_path / "e", {})

    def say(row, so_far):
        return tiny_tokenizer.decode(row.prompt)

    score(
        task, tiny_tokenizer, say, record, samples=3, environment=f"{tmp_path}/mine.py:Mine", max_tokens=2000
    )
    rows = [json.loads(line) for line in (tmp_path / "e" / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and all(len(row["completion"]) == 1 for row in rows)
    secrets = {re.search(r"secret (\d+)", row["completion"][0]["content"])[1] for row in rows}
    assert len(secrets) == 12


def test_a_limit_of_turns_and_of_tokens_ends_a_conversation(task, tiny_tokenizer, tmp_path):
    record = Record(None, {})
    score(task, tiny_tokenizer, lambda *_: "1 + 1 =", record, environment="calculator",
          max_tool_calling_iterations=2)  # fmt: skip
    assert {row["finish_reason"] for row in record.rows} == {"turns"}
    result = score(task, tiny_tokenizer, lambda *_: "1 + 1 =", environment="calculator", max_tokens=30)
    assert result.truncated == 1.0


def test_what_cannot_be_a_conversation_is_refused(task, tiny_tokenizer, tmp_path):
    (tmp_path / "raises.py").write_text(
        "class Raises:\n    def reset(self, **row):\n        raise ValueError('no')\n"
        "    def respond(self, text):\n        return None\n"
    )
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    refused = {
        "cannot be combined with tools": {"environment": "calculator", "tools": ("calculator",)},
        "does not support tools; use a model": {"tools": ("calculator",)},
        "is unknown": {"environment": "calculater"},
        "reset raised ValueError: no": {"environment": f"{tmp_path}/raises.py:Raises"},
        "Two tools are called calculator": {"tools": ("calculator", "calculator")},
        r"cannot be run \(SystemExit: 0\)": {"tools": (f"{tmp_path}/leaves.py:f",)},
    }
    for message, settings in refused.items():
        with pytest.raises(QeRLError, match=message):
            score(task, tiny_tokenizer, reads_the_answer, **settings)
