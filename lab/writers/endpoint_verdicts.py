"""Both endpoints of each comparison of a study, as a table.

python -m lab endpoints runs/matched/results.json.gz
"""

import argparse
from pathlib import Path

from lab.study.endpoints import Endpoint, endpoints
from lab.study.results import Results, read_results
from lab.writers.captions import table
from lab.writers.study_tables import pair_words
from qerl.report.runs import number


def verdicts(results: Results, file: str) -> str:
    """Table of both endpoints of each comparison that has run, in the study's order.

    Args:
        results: Of the study.
        file: The caption's last words, which say where the results are.
    """
    found, spec = endpoints(results), results.study
    lines = []
    for typical, share in zip(found[::2], found[1::2], strict=True):
        counts = f"{share.counts[0]} and {share.counts[1]} of {share.seeds}"
        lines.append((pair_words(typical.first, typical.second), *_cells(typical), counts, *_cells(share)))
    runs = (
        f"end with {spec.escape_key} above {spec.escape_above:g}, which is an escape"
        if spec.escape_above is not None
        else f"end below {spec.collapse_below:g}, which is a collapse"
    )
    head = (
        "arms",
        "typical seed",
        "p, Holm",
        "verdict",
        "runs",
        "difference of shares",
        "p, Holm",
        "verdict",
    )
    return table(
        head,
        lines,
        "Typical seed: Hodges and Lehmann's centre of the paired differences of area, first minus second, "
        f"and the signed-rank test. Runs that {runs}, and Fisher's test. Intervals are each of 95 %; p is "
        f"corrected over both endpoints of all {sum(map(len, spec.comparisons.values()))} comparisons. "
        f"{file}",
    )


def _cells(one: Endpoint) -> tuple[str, str, str]:
    low, high = one.interval
    return (
        f"{one.difference:+.3f} ({low:+.3f} to {high:+.3f})",
        number(one.holm),
        one.verdict,
    )


def main(arguments: list[str]) -> None:
    """Runs `python -m lab endpoints` with these arguments.

    Raises:
        QeRLError: The file holds no results of a study.
    """
    parser = argparse.ArgumentParser(prog="python -m lab endpoints", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="a study's results.json.gz")
    path = parser.parse_args(arguments).results
    print(verdicts(read_results(path), f"File: {path.name}."), end="")
