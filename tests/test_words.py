"""Positional words of a command before, between and behind its flags; `python -m qerl`."""

import subprocess
import sys

import pytest

from qerl import __version__
from qerl.cli import _parser


def parsed(line):
    return _parser().parse_args(line.split())


@pytest.mark.parametrize(
    "words",
    [
        "M --adapter a b",
        "--adapter a b M",
        "--adapter a b -- M",
        "--adapter a b --seed 3 M",
        "--seed 3 M --adapter a b",
        "--seed=3 --adapter a b M --task t",
        "--tools f --adapter a b M",
        "--tools=f --adapter a b M",
        "--adapter a b M --tools f",
        "M --tools f g --adapter a b",
        "M --tools f g --adapter a b --stop_strings x y",
    ],
)
def test_the_model_of_eval_may_stand_anywhere(words):
    args = parsed(f"eval {words}")
    assert args.model == "M" and [str(each) for each in args.adapter] == ["a", "b"]


@pytest.mark.parametrize(
    "words",
    [
        "M P --stop_strings a b",
        "--stop_strings a b M P",
        "--stop_strings a b -- M P",
        "--stop_strings a b M -- P",
        "M --stop_strings a b P",
        "--stop_strings a b M --seed 3 P",
        "--seed 3 --stop_strings a b M P --max_tokens 9",
        "--seed 3 M --max_tokens 9 P --stop_strings a b",
    ],
)
def test_model_and_prompt_of_generate_may_stand_anywhere(words):
    args = parsed(f"generate {words}")
    assert (args.model, args.prompt, args.stop_strings) == ("M", "P", ["a", "b"])


def test_one_adapter_and_a_model_behind_it():
    args = parsed("eval --adapter a M")
    assert args.model == "M" and [str(each) for each in args.adapter] == ["a"]


def test_a_prompt_may_look_like_a_flag():
    args = parsed("generate --stop_strings a M -- --1+1?")
    assert (args.model, args.prompt, args.stop_strings) == ("M", "--1+1?", ["a"])


@pytest.mark.parametrize(
    "words, missing",
    [
        ("eval --adapter a", "MODEL; --adapter takes all"),
        ("eval --adapter a M --tools f g", "MODEL; --adapter and --tools take all"),
        ("generate --stop_strings a b", "MODEL, PROMPT; --stop_strings takes all"),
        ("report --scores a RUN", "RUN; --scores takes all"),
    ],
)
def test_where_missing_words_went_is_said(words, missing, capsys):
    with pytest.raises(SystemExit):
        parsed(words)
    said = capsys.readouterr().err
    assert missing in said and "put them first, or after `--`" in said


def test_words_that_are_simply_missing_are_not_explained(capsys):
    with pytest.raises(SystemExit):
        parsed("eval --seed 3")
    assert capsys.readouterr().err.endswith("the following arguments are required: MODEL\n")


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "qerl", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")
