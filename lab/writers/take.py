"""Copy the results of a study into bench/results, without this machine's path to the model.

    python -m lab take runs/wp12/results.json.gz noise-wp12

The fingerprint in the facts of each run identifies the model; the last part of its path is kept for readers.
"""

import argparse
from pathlib import Path

from bench.result import RESULTS
from lab.study.results import portable


def take(source: Path, name: str) -> Path:
    """Write the results in ``source`` to ``NAME.json.gz`` and return that path; equal results, equal bytes.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The source is not compressed JSON.
        KeyError: The source holds no study.
    """
    path = RESULTS / f"{name}.json.gz"
    path.write_bytes(portable(source.read_bytes()))
    return path


def main(arguments: list[str]) -> None:
    """Run `python -m lab take` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab take", description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="a results.json.gz")
    parser.add_argument("name", help="of the file in bench/results, as noise-wp12")
    wanted = parser.parse_args(arguments)
    print(take(wanted.source, wanted.name))
