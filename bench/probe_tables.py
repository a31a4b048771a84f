"""Tables of probes for the docs, from the results of `qerl study` on a probe in bench/results."""

import gzip
import json
from functools import cache
from typing import Any

from bench.captions import table
from bench.result import RESULTS
from qerl.study.probe.summary import Estimate, Row, read_rows


@cache
def probe(name: str) -> dict[str, Any]:
    """The results of a probe, finished or not, by the name of their file."""
    found: dict[str, Any] = json.loads(gzip.decompress((RESULTS / f"{name}.json.gz").read_bytes()))
    return found


@cache
def read(name: str) -> list[Row]:
    """What the cells of a probe say."""
    return read_rows(probe(name))


def perturbations(name: str, policy: str, task: str) -> str:
    """Table of what each perturbation changes, beside clean samples of the same problems."""
    lines = []
    for row in read(name):
        if row.policy == policy and row.task == task and row.target is not None:
            numbers = row.numbers
            lines.append(
                (
                    row.what,
                    f"{numbers['kl'].value:.4f}",
                    f"{numbers['entropy'].value:.2f}",
                    *(_signed(numbers[key]) for key in ("success", "gain", "shift", "lift")),
                    f"{numbers['ess'].value:.2f}",
                )
            )
    head = (
        "perturbation", "KL, nats per token", "entropy", "one sample is right", "ln P(one of 8 is right)",
        "log-odds of right tokens", "ln mean P of right tokens", "ESS",
    )  # fmt: skip
    return table(head, lines, source(name))


def formats(name: str, task: str) -> str:
    """Table of the formats at temperature 1, beside the first; formats with several draws as a range."""
    plain: dict[str, list[Row]] = {}
    for row in read(name):
        if row.policy is None and row.task == task and row.cell.endswith("-plain"):
            plain.setdefault(row.what, []).append(row)
    lines = []
    for what, rows in plain.items():
        cells = [rows[0].numbers["error"].value]
        if len(rows) == 1:
            numbers = rows[0].numbers
            own = [_signed(numbers[key]) if key in numbers else "" for key in _FORMAT]
        else:
            own = [_range(rows, key) for key in _FORMAT]
            what = f"{what}, {len(rows)} draws"
        lines.append((what, f"{cells[0]:.3f}", *own))
    head = (
        "weights", "relative error", "entropy, own samples", "entropy, given prefixes", "one sample is right",
        "ln P(one of 8 is right)",
    )  # fmt: skip
    return table(head, lines, source(name))


_FORMAT = ("entropy_more", "prefix_more", "success", "gain")


def source(name: str) -> str:
    """Caption: on what, how much, and the file."""
    found = probe(name)
    spec = found["probe"]
    return (
        f"Differences, with 95 % intervals over {spec['problems']} problems; {spec['samples']} samples of "
        f"each; {spec['model']}, {found['device']}, {found['date'][:10]}, commit {found['commit']}. "
        f"File: {name}.json.gz."
    )


def _signed(found: Estimate, digits: int = 3) -> str:
    return f"{found.value:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"


def _range(rows: list[Row], key: str) -> str:
    values = [row.numbers[key].value for row in rows]
    return f"{min(values):+.3f} to {max(values):+.3f}"
