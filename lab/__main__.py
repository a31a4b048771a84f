"""Commands of the laboratory: `python -m lab NAME ...`; `python -m lab NAME --help` lists the options."""

import argparse
import sys
from importlib import import_module

from qerl.cli import status_of
from qerl.settings.words import with_underscores

COMMANDS = {
    "study": "study.command",
    "doses": "study.doses",
    "replicate": "study.replicate",
    "endpoints": "writers.endpoint_verdicts",
    "rates": "writers.endpoint_rates",
    "refilled_rates": "writers.refilled_rates",
    "needle": "needle.folder",
    "sums": "sums.runs",
    "testbed": "testbed.command",
    "trained": "trained.runs",
    "audit": "audit.command",
    "tables": "writers.tables",
    "draw": "writers.draw",
    "numbers": "writers.numbers",
    "take": "writers.take",
}
"""Modules by command name; each has a ``main`` that takes the arguments after the name."""


def main(arguments: list[str]) -> int:
    """Run the command that the command line names.

    Returns:
        Exit status: 2 for an error that the user can fix, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    parser.add_argument("name", choices=COMMANDS, help="what is done")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    args = parser.parse_args(arguments)
    words = with_underscores(args.arguments)
    return status_of(lambda: import_module(f"lab.{COMMANDS[args.name]}").main(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
