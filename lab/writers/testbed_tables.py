"""The table of the testbed's model: its training cost, and its priors in text, forward pass and samples."""

from bench.result import read_rows
from lab.writers.captions import table

NAME = "testbed-h200"


def priors() -> str:
    """Return the table with one line per cell."""
    made, *rows = read_rows(NAME)
    formats = list(dict.fromkeys(row["weights"] for row in rows))
    cells = {(row["kind"], row["length"], row["prior"], row["weights"]): row for row in rows}
    lines = []
    for kind, length, prior in dict.fromkeys(key[:3] for key in cells):
        own = [cells[kind, length, prior, weights] for weights in formats]
        found = [
            cell
            for row in own
            for cell in (
                f"{row['exact']:.2g} ({row['spread']:.2g})",
                f"{row['sampled']:.2g} ({row['low']:.2g} to {row['high']:.2g})",
            )
        ]
        lines.append((f"{kind}, {length}", f"{prior:g}", *found))
    head = [
        f"{what}, {weights}" for weights in formats for what in ("forward pass (SD over prompts)", "samples")
    ]
    return table(
        ("kind, length", "prior in the text", *head),
        lines,
        f"Chance of a right answer, of samples with 95 % intervals over {rows[0]['samples']}. "
        f"{made['parameters'] / 1e6:.1f}M parameters, {made['steps']} steps of {made['batch']} rows, "
        f"{made['seconds'] / 60:.1f} minutes, {made.get('gpu', made.get('machine'))}, {made['date'][:10]}, "
        f"commit {made['commit']}; weights {made['sha256'][:16]}. File: {NAME}.json.",
    )


TABLES = {"testbed-priors": priors}
