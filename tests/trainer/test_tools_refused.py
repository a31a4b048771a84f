"""Tools and environments that cannot work are refused in a sentence."""

import pytest
from datasets import Dataset

from qerl.errors import QeRLError
from tests.support.agents import multiply
from tests.support.models import make_tiny_tokenizer
from tests.support.tools import (
    DATA,
    Guessing,
    Riddle,
    make_trainer,
    riddle,
    sampled,
)


def no_docstring(a: int):
    return a


class Silent:
    def reset(self, **row):
        return None

    def respond(self, text):
        return None


class Rude(Silent):
    def reset(self, **row):
        raise KeyError("board")


class Numbered(Silent):
    def reset(self, **row):
        return 3


class Leaving(Silent):
    def reset(self, **row):
        raise SystemExit(2)


def a_class():
    return Guessing


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [no_docstring]}, "The tool no_docstring cannot be shown to the model"),
        ({"tokenizer": make_tiny_tokenizer()}, "The chat template of the tokenizer does not support tools"),
        ({"environment_factory": Riddle}, r"respond\(text\) cannot be combined with tools"),
        ({"environment_factory": 3}, "environment_factory is not callable"),
        ({"environment_factory": {}}, "environment_factory is not callable"),
        ({"environment_factory": {"a": Guessing}, "data": None}, "Several environments need a train_dataset"),
        (
            {"environment_factory": {"a": Guessing, "b": Guessing}, "data": DATA},
            "has the environment None; its column `environment` must name one of: a, b",
        ),
        (
            {
                "environment_factory": {"a": Guessing, "b": Guessing},
                "data": DATA.add_column("environment", ["a", "c"]),
            },
            "has the environment 'c'; its column `environment` must name one of: a, b",
        ),
        ({"environment_factory": a_class}, "returned the class Guessing and not an environment"),
        ({"tools": [multiply, multiply]}, "Two tools are called multiply; rename one"),
        (
            {"rollout_func": lambda prompts, trainer: {}},
            "rollout_func replaces the sampling that calls tools and environments",
        ),
        (
            {"tools": (), "tool_timeout": 3.0},
            "tool_timeout has no .*there are neither tools nor environments",
        ),
        ({"environment": "calculator"}, "hand the class to the trainer as environment_factory"),
        ({"rewards": ()}, r"reward_funcs is missing; pass .* an environment with get_reward\(\)"),
        ({"data": Dataset.from_dict({"prompt": ["text"] * 4})}, "need prompts that are lists of messages"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(tmp_path, given, said):
    with pytest.raises(QeRLError, match=said):
        make_trainer(tmp_path, **given)


@pytest.mark.parametrize(
    ("environment", "data", "said"),
    [
        (Silent, None, "reset of the environment Silent returned no observation"),
        (Rude, DATA, "The environment Rude could not begin an episode: reset raised KeyError: 'board'"),
        (Leaving, DATA, "The environment Leaving could not begin an episode: reset raised SystemExit: 2"),
        (Numbered, DATA, "reset of the environment Numbered returned a int"),
    ],
)
def test_an_environment_that_cannot_begin_is_said(tmp_path, environment, data, said):
    trainer = make_trainer(
        tmp_path,
        script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), data=data, environment_factory=environment,
    )  # fmt: skip
    with pytest.raises(QeRLError, match=said):
        sampled(trainer, trainer.train_dataset)


@pytest.mark.slow
def test_an_environment_in_which_a_call_hangs_is_not_used_again(tmp_path):
    class Stuck(Riddle):
        def respond(self, text):
            if text == "1":
                while True:
                    pass
            return

    trainer = make_trainer(
        tmp_path,
        rewards=(), script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), environment_factory=Stuck,
        tool_timeout=0.2,
    )  # fmt: skip
    sampled(trainer)
    first = list(trainer.environments)
    sampled(trainer)
    again = [a is b for a, b in zip(first, trainer.environments, strict=True)]
    assert again == [True, False, True, True] * 2
