"""The package verifiers as it is plays several turns against the policy, by its own harness and rewards."""

import itertools
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

pytest.importorskip("verifiers.v1", reason="needs the package verifiers")

import verifiers.v1 as vf

from qerl.environments.registry import get_environment
from qerl.trainer.grpo import QeRLTrainer
from qerl.user_code import load_object
from tests.support.agents import SayingEngine
from tests.support.endpoint import TOKENIZER, check_logprobs, play, tiny_engine, user
from tests.support.tools import make_args, make_policy
from tests.support.trainer import logged

pytestmark = pytest.mark.slow

EXAMPLE = "docs/examples/verifiers_calculator.py:play"
NUMBER = itertools.count()


class Letter(vf.TaskData):
    letter: str = "e"


class Letters(vf.Task[Letter]):
    @vf.reward
    async def share(self, trace) -> float:
        text = "".join(str(message.content) for message in trace.assistant_messages)
        return text.count(self.data.letter) / max(len(text), 1)


@pytest.mark.skipif(shutil.which("uv") is None, reason="verifiers runs its harness by uv")
def test_verifiers_plays_and_scores(monkeypatch):
    async def agent(endpoint, row):
        variable = f"QERL_TEST_KEY_{next(NUMBER)}"  # where verifiers looks for a key
        monkeypatch.setenv(variable, endpoint.api_key)
        config = vf.AgentConfig(
            harness={"id": "null"},
            runtime={"type": "subprocess"},
            model=endpoint.model,
            client={"type": "eval", "base_url": endpoint.base_url, "api_key_var": variable},
            sampling={"max_tokens": 12},
        )
        task = Letters(Letter(prompt=f"Say {row['letter']}.", letter=row["letter"]))
        async with vf.make_agent(config).interaction(task) as talk:
            await talk.turn()
            await talk.turn("Again.")
            await talk.turn("Once more.")
        assert talk.trace.ok, talk.trace.errors
        return talk.trace.reward

    engine = tiny_engine()
    rows = [{"letter": letter} for letter in "ee!"]
    environments, found = play(agent, rows, engine=engine, max_tokens=300)
    for environment, row, trajectory in zip(environments, rows, found, strict=True):
        assert environment.error is None
        assert trajectory.turns == 3 and not trajectory.forks
        check_logprobs(engine.model, trajectory)
        text = "".join(each["content"] for each in trajectory.messages if each["role"] == "assistant")
        assert environment.reward == pytest.approx(text.count(row["letter"]) / max(len(text), 1))


def test_the_example_plays_with_its_calculator_and_is_right_or_wrong():
    said = {0: "12 + 5 =", 1: "12 - 5 ="}

    def say(row, so_far):
        if "user" not in so_far:  # the calculator has not spoken
            return said[row.prompt_number]
        return f"#### {17 if '17' in so_far else 'seven'}"

    rows = [{"prompt": [user(text)], "answer": "17"} for text in ("Twelve and five?", "Five and twelve?")]
    environments, found = play(
        load_object(EXAMPLE, "agent"), rows, engine=SayingEngine(TOKENIZER, say), max_tokens=200
    )
    assert [environment.error for environment in environments] == [None, None]
    assert [environment.reward for environment in environments] == [1.0, 0.0]
    for trajectory, value in zip(found, ("17", "7"), strict=True):
        assert trajectory.turns == 2 and not trajectory.forks
        assert [each["content"] for each in trajectory.messages if each["role"] == "user"][-1] == value


def test_the_example_gives_nothing_to_a_conversation_that_has_used_up_its_tokens():
    """What is said without end leaves no room for the calculator's answer."""
    engine = SayingEngine(TOKENIZER, lambda row, so_far: "12 + 5 =")
    rows = [{"prompt": [user("Twelve and five?")], "answer": "17"}]
    said = len(TOKENIZER.encode("12 + 5 ="))
    (environment,), (trajectory,) = play(
        load_object(EXAMPLE, "agent"), rows, engine=engine, max_tokens=said + 3
    )
    assert (environment.error, environment.reward) == (None, 0.0)
    assert trajectory.turns == 1


def test_a_run_is_trained_on_what_verifiers_played(tmp_path):
    """The rewards are those of its traces, and the trained tokens those that were sampled, turn by turn."""
    agent = tmp_path / "letters.py"
    agent.write_text(LETTERS.format(folder=str(Path(EXAMPLE).parent.resolve())))
    samples = []
    trainer = QeRLTrainer(
        make_policy(),
        [],
        make_args(tmp_path, max_completion_length=400, max_steps=2, beta=0.0),
        Dataset.from_list([{"prompt": [user(text)], "answer": text} for text in ("ab", "cd", "ef")]),
        processing_class=TOKENIZER,
        environment_factory=get_environment(f"endpoint:{agent}:play", {"timeout": 200.0}),
    )
    train = trainer.rollouts.train

    def kept(*args):
        found = train(*args)
        samples.append(found.samples)
        return found

    trainer.rollouts.train = kept
    trainer.train()
    trainer._conversations.__exit__()
    rows = logged(trainer)
    assert len(rows) == 2
    for row in rows:
        assert row["loss"] != 0 and row["rollout/turns"] == 3
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
    played = [float(line) for line in (tmp_path / "rewards.txt").read_text().split()]
    trained = [sample.rewards[0] for step in samples for sample in step]
    assert sorted(trained) == pytest.approx(sorted(played))
    assert len(set(played)) > 3


LETTERS = """
import sys
from pathlib import Path

sys.path.insert(0, "{folder}")
import verifiers.v1 as vf
import verifiers_calculator as example


class Letters(vf.Task[example.Sum]):
    @vf.reward
    async def share(self, trace) -> float:
        text = "".join(str(message.content) for message in trace.assistant_messages)
        return text.count("e") / max(len(text), 1)


example.Sums = Letters
example.Calculator = type("Again", (), {{"respond": lambda self, text: "Again."}})


async def play(endpoint, row):
    reward = await example.play(endpoint, row)
    with (Path(__file__).parent / "rewards.txt").open("a") as file:
        print(reward, file=file)
    return reward
"""
