"""Agents in a process of their own: what comes back, what is refused, and what ends with it."""

import asyncio
import functools
import os
import threading
import time

import pytest

from qerl.agents.outside import Endpoint
from qerl.agents.play import Endpoints
from qerl.agents.process import AgentProcess, EndpointOf, _Process, named
from qerl.calls.beside import Beside
from qerl.errors import QeRLError
from qerl.user_code import load_object
from tests.endpoint.agents_elsewhere import decorated, number, surroundings, talk, talk_later
from tests.support.endpoint import TOKENIZER, play, rollouts, tiny_engine

pytestmark = pytest.mark.slow

OPTIONS = {"process": True}


def row(**more):
    return {"prompt": "a"} | more


@pytest.mark.parametrize("agent", [talk, talk_later])
def test_agents_talk_from_another_process(agent):
    environments, found = play(agent, [row(), row(), row(posts=True)], options=OPTIONS)
    (process,) = {each.get_reward() for each in environments}  # one for all
    assert process != os.getpid()
    assert [each.turns for each in found] == [2, 2, 2] and not any(each.forks for each in found)


def test_what_they_draw_is_what_agents_here_draw():
    engine = tiny_engine()
    (_, here), (_, there) = (
        play(talk, [row(), row()], engine=engine, options={"process": each}) for each in (False, True)
    )
    assert [each.token_ids for each in here] == [each.token_ids for each in there]
    assert [each.written for each in here] == [each.written for each in there]


@pytest.mark.parametrize("agent", [talk, talk_later])
def test_one_that_fails_costs_its_own_row(agent):
    rows = [row(raises="no\nmore"), row(exits=True), row(), row(sleeps=True)]
    environments, _ = play(agent, rows, options=OPTIONS | {"timeout": 3.0})
    errors = [each.error for each in environments]
    assert errors[0] == "The agent failed: ValueError: no"
    assert errors[1] == "The agent failed: SystemExit: 3"
    assert environments[2].get_reward() > 0
    assert "no result within 3 s" in errors[3]


def test_one_that_holds_up_the_loop_is_interrupted_and_the_process_goes_on():
    rows = [row(), row(holds=True), row()]
    environments, _ = play(talk_later, rows, options=OPTIONS | {"timeout": 3.0, "at_once": 1})
    assert environments[1].error is not None and environments[1].reward is None
    assert environments[0].get_reward() == environments[2].get_reward()


def test_a_process_that_hangs_is_ended_and_others_run_in_another(monkeypatch):
    monkeypatch.setattr("qerl.agents.process._START_S", 3.0)
    rows = [row(), row(hangs=True), row()]
    environments, _ = play(talk, rows, options=OPTIONS | {"timeout": 3.0, "at_once": 1})
    assert environments[1].error is not None and environments[1].reward is None
    assert environments[0].get_reward() != environments[2].get_reward()


def test_one_that_hangs_costs_no_further_rollout(monkeypatch):
    """Others' rows are more than its pipe holds, and it reads none of them."""
    environments = [Endpoint(talk, timeout=seconds, process=True) for seconds in (2.0, 2.0, 2.0, 60.0)]
    with rollouts(environments) as play_rows:
        with monkeypatch.context() as soon:
            soon.setattr("qerl.agents.process._START_S", 2.0)
            play_rows(*(row(more="x" * 100_000, hangs=at == 0) for at in range(4)))
        assert all("hung" in (each.error or "") for each in environments)
        assert environments[3].error == "The agent failed: the process of the agents hung and was ended"
        assert not any(each.reward is not None for each in environments)
        for each in environments:
            each.timeout = 60.0
        play_rows(*(row(more="x" * 100_000) for _ in range(4)))
    assert [each.error for each in environments] == [None] * 4
    assert all(each.get_reward() > 0 for each in environments)


def test_what_is_lost_with_a_process_that_hangs_is_told_so():
    process = _Process()
    found = process.begin(named(talk), EndpointOf("", "", ""), row(hangs=True), 60.0)
    process.kill(hung=True)
    assert found.result(10).failure == "the process of the agents hung and was ended"


def test_programs_of_agents_have_the_search_path_of_the_run():
    path = os.environ.get("PYTHONPATH", "")
    environments, _ = play(surroundings, [row(path=path)], options=OPTIONS)
    assert environments[0].get_reward() == 1.0


def test_what_agents_print_is_there_while_they_run(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    calls, process = Beside(), AgentProcess()
    asked = process.run(surroundings, EndpointOf("", "", ""), row(path="", stays=60.0), 90.0)
    future, until = calls.start(asked), time.monotonic() + 30
    said = ""
    while "said at once" not in said and time.monotonic() < until:
        said += capfd.readouterr().err
        time.sleep(0.05)
    future.cancel()
    process.close()
    calls.close()
    assert "said at once" in said and time.monotonic() < until


def test_a_file_that_begins_a_run_of_its_own_says_so(tmp_path):
    (tmp_path / "train.py").write_text(
        "from qerl.agents.outside import Endpoint\n"
        "def agent(endpoint, row):\n    return 1.0\n"
        "Endpoint(agent, process=True)\n"
    )
    agent = load_object(f"{tmp_path}/train.py:agent", "agent")
    environments, _ = play(agent, options=OPTIONS)
    assert "file starts a run" in environments[0].error


def test_a_row_that_cannot_go_there_fails():
    environments, _ = play(talk, [row(lock=threading.Lock()), row()], options=OPTIONS)
    assert environments[0].error.startswith("The agent failed: TypeError: cannot pickle")
    assert environments[1].get_reward() > 0


def test_a_process_that_dies_costs_what_ran_in_it(tmp_path):
    engine = tiny_engine()
    environments, _ = play(talk, [row(dies=True)], engine=engine, options=OPTIONS)
    assert environments[0].error == "The agent failed: the process of the agents ended with status 7"
    several = [row(dies=True), *[row() for _ in range(6)]]  # of whom the last ones start another
    environments, found = play(talk, several, engine=engine, options=OPTIONS | {"at_once": 1})
    assert environments[0].error is not None
    assert all(each.get_reward() > 0 for each in environments[1:])
    assert [each.turns for each in found[1:]] == [2] * 6


def test_it_ends_with_the_endpoint(monkeypatch):
    process = AgentProcess()
    ran = asyncio.run(process.run(number, EndpointOf("", "", ""), {}, 60.0))
    os.kill(int(ran.reward), 0)
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(ran.reward), 0)
    AgentProcess().close()  # which was never started
    closed = []
    endpoints = Endpoints(TOKENIZER, None, Beside())
    monkeypatch.setattr(AgentProcess, "close", lambda self: closed.append(self))
    endpoints.close()
    assert len(closed) == 1


def test_what_is_asked_of_a_process_that_has_ended_is_lost():
    process = _Process()
    process.kill()
    lost = [process.begin("nowhere.py:a", EndpointOf("", "", ""), {}, 60.0) for _ in range(2)]
    assert all("ended with status -9" in each.result(10).failure for each in lost)
    time.sleep(0.1)  # its listener is done
    assert "ended with status -9" in process.begin("nowhere.py:a").result(10).failure


def test_what_no_file_defines_is_refused():
    def inner(endpoint, row):
        return 1.0

    for agent in (inner, functools.partial(talk), lambda endpoint, row: 1.0, Endpoint):
        with pytest.raises(QeRLError, match="at the top of a file"):
            Endpoint(agent, process=True)
    assert named(talk).endswith("tests/endpoint/agents_elsewhere.py:talk")
    assert named(decorated).endswith("tests/endpoint/agents_elsewhere.py:decorated")
