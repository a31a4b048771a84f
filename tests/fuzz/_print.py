"""A fuzzer's command line: how many cases, which seed, and the counts in one line."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path


def run_and_print(name: str, run: Callable[[int, int, Path], dict[str, int]], arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz {name}")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            counts = run(args.count, args.seed, Path(folder))
        except AssertionError as error:
            print(f"{name}, seed {args.seed}: FOUND {error}")
            return 1
    parts = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{name}, seed {args.seed}: {args.count} cases, {parts}")
    return int(counts.get("found", 0) > 0)
