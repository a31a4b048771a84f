"""Both endpoints of each comparison of a study, as a table.

python -m lab endpoints runs/matched/results.json.gz
"""

import argparse
from collections.abc import Collection
from pathlib import Path

import numpy as np

from lab.study.endpoints import Endpoint, endpoints
from lab.study.error_rates import of_endpoint
from lab.study.results import Results, read_results
from lab.writers.captions import table
from lab.writers.study_tables import pair_words
from qerl.report.runs import number

NOT_READ = "not read"


def verdicts(results: Results, file: str, shares_only: Collection[str] = ()) -> str:
    """Return the table of both endpoints of each comparison that has run, in the study's order.

    Args:
        results: Results of the study.
        file: Last words of the caption, naming the results' file.
        shares_only: Families of which the plan reads no typical seed.
    """
    found, spec = endpoints(results), results.study
    if not found:
        return f"No comparison has run in two seeds yet. {file}\n"
    lines = []
    for typical, share in zip(found[::2], found[1::2], strict=True):
        counts = f"{share.counts[0]} and {share.counts[1]} of {share.seeds}"
        unread = typical.family in shares_only
        own, its = (NOT_READ, "", "", "") if unread else _cells(results, typical), _cells(results, share)
        lines.append((pair_words(typical.first, typical.second), *own, counts, *its))
    runs = (
        f"end with {spec.escape_key} above {spec.escape_above:g}, which is an escape"
        if spec.escape_above is not None
        else f"end below {spec.collapse_below:g}, which is a collapse"
    )
    planned = sum(map(len, spec.comparisons.values()))
    missing = planned - len(lines)
    head = (
        "arms",
        "typical seed",
        "p, Holm",
        "verdict",
        "false claims; found from",
        "runs",
        "difference of shares",
        "p, Holm",
        "verdict",
        "false claims; found from",
    )
    return table(
        head,
        lines,
        "Typical seed: Hodges and Lehmann's centre of the paired differences of area, first minus second, "
        f"and the signed-rank test. Runs that {runs}, and Fisher's test. Intervals are each of 95 %; p is "
        f"corrected over both endpoints of all {planned} comparisons"
        + f", of which {missing} have not run"
        * bool(missing)
        + ". False claims: how often a difference would be claimed of two arms that have none, at the level "
        "that the correction leaves to the smallest p; then the smallest difference that is found with power "
        f".8, of centres or of shares. {file}",
    )


def _cells(results: Results, one: Endpoint) -> tuple[str, str, str, str]:
    (low, high), rates = one.interval, of_endpoint(results, one)
    least = "none" if np.isnan(rates.found) else f"{rates.found:.3f}"
    return (
        f"{one.difference:+.3f} ({low:+.3f} to {high:+.3f})",
        number(one.holm),
        one.verdict,
        f"{rates.false:.3f}; {least}",
    )


def main(arguments: list[str]) -> None:
    """Run `python -m lab endpoints` with these arguments.

    Raises:
        QeRLError: The file holds no results of a study.
    """
    parser = argparse.ArgumentParser(prog="python -m lab endpoints", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="a study's results.json.gz")
    path = parser.parse_args(arguments).results
    print(verdicts(read_results(path), f"File: {path.name}."), end="")
