"""Reward functions of the user's own, in a Python file."""

from pathlib import Path

import pytest

from qerl.errors import QeRLError
from qerl.user_code import load_object

REWARDS = """
from math import isclose

def brief(prompts, completions, **columns):
    return [1.0 / len(c) for c in completions]

def _helper():
    pass

limit = 3
"""


@pytest.mark.parametrize("name", [":brief", ""])
def test_custom_reward_is_loaded_from_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    reward = load_object(f"{tmp_path / 'mine.py'}{name}", "reward")
    assert reward.__name__ == "brief"
    assert reward(prompts=["p"] * 2, completions=["ab", "abcd"], answer=["", ""]) == [0.5, 0.25]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mine", "not of the form PATH.py:function"),
        ("two.py", r"two\.py has 2 candidates for a reward \(brief, short\); write .*two\.py:NAME"),
        ("none.py", r"none\.py has 0 candidates for a reward \(none\)"),
        ("mine.txt:brief", "not of the form PATH.py:function"),
        ("other.py:brief", r"The reward file .*other\.py does not exist"),
        ("mine.py:breif", r"mine\.py has no function 'breif'; it has: brief\.$"),
        ("mine.py:limit", "has no function 'limit'"),
        ("broken.py:brief", r"broken\.py cannot be run \(ZeroDivisionError: division by zero\); fix it"),
        ("syntax.py:brief", r"syntax\.py cannot be run \(SyntaxError: .*line \d+\)\); fix it"),
    ],
)
def test_custom_reward_errors_say_what_to_mend(tmp_path: Path, spec: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "two.py").write_text(f"{REWARDS}\ndef short(completions, **columns):\n    return []\n")
    (tmp_path / "none.py").write_text("from math import isclose\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def brief(:\n")
    with pytest.raises(QeRLError, match=said):
        load_object(f"{tmp_path}/{spec}", "reward")
