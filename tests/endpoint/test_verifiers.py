"""The package verifiers as it is plays several turns against the policy, by its own harness and rewards."""

import itertools
import shutil

import pytest

pytest.importorskip("verifiers.v1", reason="needs the package verifiers")

import verifiers.v1 as vf

from tests.support.endpoint import check_logprobs, play, tiny_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("uv") is None, reason="verifiers runs its harness by uv"),
]

NUMBER = itertools.count()


class Letter(vf.TaskData):
    letter: str = "e"


class Letters(vf.Task[Letter]):
    @vf.reward
    async def share(self, trace) -> float:
        text = "".join(str(message.content) for message in trace.assistant_messages)
        return text.count(self.data.letter) / max(len(text), 1)


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
