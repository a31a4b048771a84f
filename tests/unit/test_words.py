"""The model of `qerl eval` before and behind its flags."""

import pytest

from qerl.cli import _parser
from qerl.cli_results import EVAL_LISTS
from qerl.settings.words import model_first


@pytest.mark.parametrize(
    "words",
    [
        "M --adapter a b",
        "--adapter a b M",
        "--adapter a b --seed 3 M",
        "--seed 3 M --adapter a b",
        "--seed=3 --adapter a b M --task t",
        "--tools f --adapter a b M",
        "--adapter a b M --tools f",
        "M --tools f g --adapter a b",
    ],
)
def test_the_model_may_stand_anywhere(words):
    args = _parser().parse_args(model_first(["eval", *words.split()], EVAL_LISTS))
    assert args.model == "M" and [str(each) for each in args.adapter] == ["a", "b"]


def test_one_adapter_and_a_model_behind_it():
    args = _parser().parse_args(model_first(["eval", "--adapter", "a", "M"], EVAL_LISTS))
    assert args.model == "M" and [str(each) for each in args.adapter] == ["a"]


@pytest.mark.parametrize("words", ["--adapter a", "--adapter a b --tools f g", "", "--help"])
def test_what_names_no_model_is_left_as_it_is(words):
    assert model_first(["eval", *words.split()], EVAL_LISTS) == ["eval", *words.split()]
