"""What a demo learns: greedy accuracy on held-out problems before and after training, one row for each seed.

    python -m bench demo docs/examples/verifiers-calculator.yaml --seed 0 \\
        --out bench/results/demo-verifiers-CARD.json

It is `qerl demo`, whose scores are kept in a file. Rows of a file that is there stay, so seeds can be run one
by one, at one commit. Recipes with an environment of another package are run where that is installed.
"""

import argparse
import shlex
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from bench.result import Row, add_row
from qerl.demo import run_demo
from qerl.errors import QeRLError
from qerl.settings.recipe import load_config


def measure(recipe: str, seed: int, folder: Path, console: Console) -> Row:
    """The row of one seed.

    Args:
        recipe: Name or file.
        seed: Of the run.
        folder: The run's folder is written below it.
        console: Shows progress.

    Raises:
        QeRLError: Training was interrupted.
    """
    busy = time.process_time()
    found = run_demo(load_config([recipe], {"seed": seed, "output_dir": str(folder / "demo")}), console)
    if found is None:
        raise QeRLError("The demo was interrupted; its row is not written.")
    before, after = (100 * each.accuracy for each in (found.before, found.after))
    return {
        "recipe": recipe, "seed": seed, "problems": found.before.problems, "before": round(before, 1),
        "after": round(after, 1), "gain_points": round(after - before, 1),
        "minutes": round(found.seconds / 60, 1),
        "cpu_minutes": round((time.process_time() - busy) / 60, 1), "threads": torch.get_num_threads(),
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench demo", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="demo", help="name or file of a recipe of `qerl demo`")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--note", default="", help="what else the machine did, as a field of the rows")
    parser.add_argument("--out", type=Path, help="JSON file, to whose rows these are added")
    return parser


def main(arguments: list[str]) -> None:
    """Runs `python -m bench demo` with these arguments."""
    args = _parser().parse_args(arguments)
    for seed in args.seed:
        with tempfile.TemporaryDirectory(prefix="qerl-demo-") as folder:
            found = measure(args.recipe, seed, Path(folder), Console())
        if args.out:
            add_row(args.out, shlex.join(["demo", *arguments]), {**found, "note": args.note})
