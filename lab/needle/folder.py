"""Print the folder of the needle policy, a checkpoint in the cache that the first call trains.

python -m lab needle        # prints the folder
"""

import argparse
from pathlib import Path

from lab import scratch
from lab.needle import language, training

NEEDLE = "needle"
"""Name by which studies know the model and its task."""

SOURCES = (scratch, language, training)
"""Modules that decide what the policy is."""


def needle_folder() -> Path:
    """The folder with the policy in bfloat16, its config and its tokenizer; trained on the first call.

    Raises:
        QeRLError: The trained policy misses its priors.
    """
    return scratch.policy_folder(NEEDLE, SOURCES, training.train_policy, language.make_tokenizer)


def main(arguments: list[str]) -> None:
    """Run `python -m lab needle` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab needle", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    print(needle_folder())
