"""Take the results of a study into bench/results, without this machine's path to the model.

    python -m lab take runs/wp12/results.json.gz noise-wp12

Which model it was is its fingerprint in the facts of each run; the name of the file is kept for the reader.
"""

import argparse
from pathlib import Path

from bench.result import RESULTS
from lab.study.results import portable


def take(source: Path, name: str) -> Path:
    """Write what is in ``source`` as ``NAME.json.gz`` and return that file; equal results give equal bytes.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: The source holds no compressed JSON.
        KeyError: It holds no study.
    """
    path = RESULTS / f"{name}.json.gz"
    path.write_bytes(portable(source.read_bytes()))
    return path


def main(arguments: list[str]) -> None:
    """Runs `python -m lab take` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab take", description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="a results.json.gz")
    parser.add_argument("name", help="of the file in bench/results, as noise-wp12")
    wanted = parser.parse_args(arguments)
    print(take(wanted.source, wanted.name))
