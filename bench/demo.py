"""Learning by a demo: greedy accuracy on held-out problems before and after training, one row per seed.

    python -m bench demo docs/examples/verifiers-calculator.yaml --seed 0 \\
        --out bench/results/demo-verifiers-CARD.json

It runs `qerl demo` and saves the scores. Rows are appended to an existing file, so seeds can be run one by
one, at one commit. Recipes with an environment of another package need that package installed.
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
    """Run the demo with one seed and return its row.

    Args:
        recipe: Name or file of the recipe.
        seed: Seed of the run.
        folder: Parent of the run's folder.
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
    parser.add_argument("--note", default="", help="note for the rows: what else the machine did")
    parser.add_argument("--out", type=Path, help="JSON file; rows are added to it")
    return parser


def main(arguments: list[str]) -> None:
    """Run `python -m bench demo` with these arguments."""
    args = _parser().parse_args(arguments)
    for seed in args.seed:
        with tempfile.TemporaryDirectory(prefix="qerl-demo-") as folder:
            found = measure(args.recipe, seed, Path(folder), Console())
        if args.out:
            add_row(args.out, shlex.join(["demo", *arguments]), {**found, "note": args.note})
