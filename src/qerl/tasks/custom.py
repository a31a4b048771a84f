"""The user's own reward functions, from a Python file."""

from qerl.tasks.judging import RewardFunction
from qerl.user_code import load_object


def load_reward(spec: str) -> RewardFunction:
    """Load the reward function that ``PATH.py:function`` names.

    Raises:
        QeRLError: The specification is malformed, the file is missing or fails to run, or it has no such
            function.
    """
    return load_object(spec, "reward")
