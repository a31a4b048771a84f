"""Environments of OpenEnv, against the real package: in this process, and behind a server of its own."""

import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def game(tmp_path: Path) -> str:
    path = tmp_path / "game.py"
    path.write_text(GAME)
    return f"openenv:{path}:Game"


def play(environment, low: int, high: int, action: str = "{}") -> tuple[list[int], float]:
    """Halve the range until the episode is over; the guesses, and the reward."""
    guesses = []
    while True:
        guesses.append((low + high) // 2)
        said = environment.respond(action.format(guesses[-1]))
        if said is None:
            return guesses, environment.get_reward()
        low, high = (guesses[-1] + 1, high) if "higher" in said else (low, guesses[-1] - 1)


def test_an_episode_runs_in_this_process_and_its_rewards_add_up(game: str) -> None:
    environment = check_environment(get_environment(game, {"class_options": {"largest": 50}}))
    assert is_text(environment)
    assert environment.reset(prompt=[{"role": "user", "content": "Guess."}], answer="") == "a number up to 50"
    guesses, reward = play(environment, 1, 50)
    assert reward == pytest.approx(1 - 0.1 * (len(guesses) - 1))
    assert environment.respond("1") is None


def test_samples_of_a_row_meet_the_same_episode_and_other_rows_another(game: str) -> None:
    def number(**row: object) -> int:
        environment = get_environment(game, {})()
        environment.reset(**row)
        return play(environment, 1, 100)[0][-1]

    assert number(prompt="a") == number(prompt="a")
    assert len({number(prompt=name) for name in "abcdef"}) > 3
    assert number(prompt="a", seed=7) == number(prompt="b", seed=7)


def test_an_action_that_is_not_accepted_is_answered_and_changes_nothing(game: str) -> None:
    environment = get_environment(game, {})()
    environment.reset(prompt="a")
    assert "not accepted: number: Input should be a valid integer" in environment.respond("fifty")
    environment = get_environment(game, {"action_field": "guess"})()
    environment.reset(prompt="a")
    assert "not accepted" in environment.respond("5")
    assert environment.get_reward() == 0.0


def test_columns_of_the_row_reach_reset(game: str) -> None:
    environment = get_environment(game, {"reset_columns": ["largest"], "observation_field": "hint"})()
    assert environment.reset(prompt="a", largest=3) == "a number up to 3"
    with pytest.raises(QeRLError, match="reset_columns names 'largest', which no column"):
        environment.reset(prompt="a", answer="1")


@pytest.mark.parametrize(
    ("where", "options", "said"),
    [
        ("nowhere", {}, "is neither a URL nor a class"),
        ("json:Nothing", {}, "The module json has no class 'Nothing'"),
        ("no_such_module:Game", {}, "The module no_such_module cannot be imported"),
        ("http://127.0.0.1:9", {}, r"The OpenEnv server http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_cannot_be_had_is_said(where: str, options: dict, said: str) -> None:
    with pytest.raises(QeRLError, match=said):
        get_environment(f"openenv:{where}", options)()


def test_options_of_the_class_and_fields_are_checked(game: str) -> None:
    with pytest.raises(QeRLError, match="class_options do not fit"):
        get_environment(game, {"class_options": {"digits": 3}})()
    with pytest.raises(QeRLError, match=r"observation has no field 'text'; it has: .*hint"):
        get_environment(game, {"observation_field": "text"})().reset(prompt="a")


@pytest.fixture
def server(game: str) -> Iterator[str]:
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    from qerl.user_code import load_object

    cls = load_object(game.removeprefix("openenv:"), "environment", "class")
    module = __import__("sys").modules.get(cls.__module__)
    names = vars(module) if module else cls.step.__globals__
    app = create_fastapi_app(cls, names["Guess"], names["Seen"], max_concurrent_envs=2)
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
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(timeout=10)


def test_an_episode_runs_behind_a_server(server: str) -> None:
    environment = get_environment(f"openenv:{server}", {})()
    other = get_environment(f"openenv:{server}", {"action_field": "number"})()
    for env in (environment, other):
        assert env.reset(prompt="a") == "a number up to 100"
    assert "not accepted: it is no JSON object" in environment.respond("50")
    assert "not accepted: Server error" in environment.respond('{"guess": 50}')
    guesses, reward = play(environment, 1, 100, action='{{"number": {}}}')
    assert play(other, 1, 100) == (guesses, reward)
    assert reward == pytest.approx(1 - 0.1 * (len(guesses) - 1))
