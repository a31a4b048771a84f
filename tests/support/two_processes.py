"""Runs recipes on two processes each: ``python -m tests.support.two_processes RECIPE...``.

The processes are forks of this one, so torch is imported once for all of them.
"""

import gc
import sys
from pathlib import Path

import torch

from tests.fuzz._forks import Forks

LIMIT = 100.0  # seconds that a run may take


def main(recipes: list[str]) -> int:
    """The exit status: 1 where a process did not end with 0, and then what all of them wrote."""
    torch.set_num_threads(1)
    gc.freeze()
    for recipe in recipes:
        forks = Forks(["train", recipe], 2, Path(recipe).with_suffix(".log"), LIMIT)
        if any(forks.wait()):
            print(forks.text, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
