"""Environments of OpenEnv, against the real package: behind a server of its own."""

import importlib.util
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from qerl.agents.environment import check_environment, is_text
from qerl.environments import get_environment
from qerl.errors import QeRLError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="needs the package openenv-core"
)

GAME = """
import random

from openenv.core.env_server import Action, Environment, Observation, State


class Guess(Action):
    number: int


class Seen(Observation):
    hint: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, largest: int = 100):
        super().__init__()
        self.largest = largest
        self.steps = 0

    def reset(self, seed=None, largest=None) -> Seen:
        self.steps = 0
        self.number = random.Random(seed).randint(1, largest or self.largest)
        return Seen(hint=f"a number up to {largest or self.largest}")

    def step(self, action: Guess) -> Seen:
        self.steps += 1
        if action.number == self.number:
            return Seen(hint="yes", done=True, reward=1.0)
        return Seen(hint="higher" if action.number < self.number else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    from qerl.user_code import load_object

    path = tmp_path_factory.mktemp("openenv") / "game.py"
    path.write_text(GAME)
    cls = load_object(f"{path}:Game", "environment", "class")
    names = cls.step.__globals__
    app = create_fastapi_app(cls, names["Guess"], names["Seen"], max_concurrent_envs=32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    for _ in range(200):
        if running.started:
            break
        time.sleep(0.05)
    assert running.started
    yield f"openenv:http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(timeout=10)


def play(environment, low: int, high: int, action: str = "{}") -> tuple[list[int], float]:
    """Halve the range until the episode is over; the guesses, and the reward."""
    guesses = []
    while True:
        guesses.append((low + high) // 2)
        said = environment.respond(action.format(guesses[-1]))
        if said is None:
            return guesses, environment.get_reward()
        low, high = (guesses[-1] + 1, high) if "higher" in said else (low, guesses[-1] - 1)


def test_an_episode_runs_behind_a_server_and_its_rewards_add_up(server: str) -> None:
    environment = check_environment(get_environment(server, {}))
    assert is_text(environment)
    other = get_environment(server, {"action_field": "number"})()
    for env in (environment, other):
        assert env.reset(prompt=[{"role": "user", "content": "Guess."}], answer="") == "a number up to 100"
    guesses, reward = play(environment, 1, 100, action='{{"number": {}}}')
    assert play(other, 1, 100) == (guesses, reward)
    assert reward == pytest.approx(1 - 0.1 * (len(guesses) - 1))
    assert environment.respond("1") is None
    environment.close()
    other.close()


def test_samples_of_a_row_meet_the_same_episode_and_other_rows_another(server: str) -> None:
    environment = get_environment(server, {"action_field": "number"})()

    def number(**row: object) -> int:
        environment.reset(**row)
        return play(environment, 1, 100)[0][-1]

    assert number(prompt="a") == number(prompt="a")
    assert len({number(prompt=name) for name in "abcdef"}) > 3
    assert number(prompt="a", seed=7) == number(prompt="b", seed=7)
    environment.close()


def test_an_action_that_is_not_accepted_is_answered_and_changes_nothing(server: str) -> None:
    environment = get_environment(server, {})()
    environment.reset(prompt="a")
    assert environment.respond("50") == "This action was not accepted: it is no JSON object."
    assert "not accepted: Server error" in environment.respond('{"guess": 50}')
    assert environment.get_reward() == 0.0
    environment.close()


def test_columns_of_the_row_reach_reset(server: str) -> None:
    environment = get_environment(server, {"reset_columns": ["largest"], "observation_field": "hint"})()
    assert environment.reset(prompt="a", largest=3) == "a number up to 3"
    with pytest.raises(
        QeRLError, match="reset_columns names 'largest', but the task's rows have no such column"
    ):
        environment.reset(prompt="a", answer="1")
    environment.close()


def test_a_field_that_an_observation_has_not_is_said(server: str) -> None:
    environment = get_environment(server, {"observation_field": "text"})()
    with pytest.raises(QeRLError, match=r"observation has no field 'text'; it has: .*hint"):
        environment.reset(prompt="a")
    environment.close()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("game.py:Game", "is no URL; serve the class by openenv-core"),
        ("http://127.0.0.1:9", r"The OpenEnv server http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_cannot_be_had_is_said(where: str, said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_environment(f"openenv:{where}", {})()
