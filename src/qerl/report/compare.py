"""Several runs side by side in the terminal: differing settings, metrics and held-out scores.

The numbers are those of the report's page, without curves: for a machine without a browser, and for a quick
look. A value is the mean of the last tenth of the logged values, as single steps are noisy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qerl.errors import QeRLError
from qerl.report.page import completed, differing
from qerl.report.runs import METRICS, Run, number, read_runs, shown_series
from qerl.report.scores import Score, read_scores
from qerl.run_folder import METRICS_FILE


def compare(folders: Sequence[Path], console: Console, scores: Sequence[Path] = ()) -> None:
    """Print the settings that differ, the metrics and the held-out scores of runs.

    Args:
        folders: Run folders, each given once, in the order of the columns.
        console: Where to print.
        scores: Folders of evaluations outside the run folders; those inside are found.

    Raises:
        QeRLError: A folder is no run, or none has logged a training step yet.
    """
    runs = read_runs(folders)
    if not any(run.last_step for run in runs):
        raise QeRLError(f"None of the runs has a step in its {METRICS_FILE} yet; wait for the first step.")
    console.print(_table("settings that differ", runs, _settings(runs)))
    console.print(_table("mean of the last tenth", runs, _metrics(runs)))
    found, others = _scores(runs, read_scores(runs, scores))
    if found:
        console.print(_table("held-out score, %, with its 95 % interval", runs, found))
    for other in others:
        console.print(other, markup=False, highlight=False, soft_wrap=True)


Rows = list[tuple[str, list[str]]]


def _table(title: str, runs: Sequence[Run], rows: Rows) -> Table:
    table = Table()
    table.add_column(title)
    for run in runs:
        table.add_column(Text(run.label), justify="right")
    for name, cells in rows:
        table.add_row(Text(name), *map(Text, cells))
    if not rows:
        table.add_row(Text("none"))
    return table


def _settings(runs: Sequence[Run]) -> Rows:
    """Settings whose values are not the same in all runs that have a config.yaml."""
    known: list[dict[str, Any]] = [run.settings for run in runs if run.settings is not None]
    rows: Rows = []
    for key, values in differing(completed(known)).items():
        left = iter(values)
        rows.append((key, ["-" if run.settings is None else next(left) for run in runs]))
    return rows


def _metrics(runs: Sequence[Run]) -> Rows:
    rows: Rows = [("Steps", [str(run.last_step) for run in runs])]
    for metric in METRICS:
        found = [shown_series(run, metric) for run in runs]
        if any(found):
            unit = f", {metric.unit}" if metric.unit else ""
            cells = ["-" if data is None else number(data.tail_mean * metric.scale) for data in found]
            rows.append((f"{metric.title}{unit}", cells))
    return rows


def _scores(runs: Sequence[Run], scores: Sequence[Score]) -> tuple[Rows, list[str]]:
    """Return a row for each kind of score, with a line for each scored policy of a run; and a sentence for
    each other policy, such as the base model."""
    rows: dict[str, list[str]] = {}
    others = []
    for score, kind in zip(scores, _kinds(scores), strict=True):
        low, high = (100 * end for end in score.result.interval)
        of_checkpoint = f" ({score.checkpoint})" if score.checkpoint else ""
        cell = f"{100 * score.result.accuracy:.1f} ({low:.1f} to {high:.1f}){of_checkpoint}"
        if score.run is None:
            others.append(f"{score.what}: {cell} of {kind}")
            continue
        cells = rows.setdefault(kind, ["-"] * len(runs))
        cells[score.run] = cell if cells[score.run] == "-" else f"{cells[score.run]}\n{cell}"
    return list(rows.items()), others


def _kinds(scores: Sequence[Score]) -> list[str]:
    """Return a description of each score, with the sampling settings that tell otherwise equal ones apart."""
    asked: dict[str, list[dict[str, Any]]] = {}
    names = [f"{each.result.task}, {each.measure}, {each.result.problems} problems" for each in scores]
    for name, score in zip(names, scores, strict=True):
        asked.setdefault(name, []).append(score.result.settings)
    kinds = []
    for name, score in zip(names, scores, strict=True):
        keys = [key for key in differing(asked[name]) if key != "seed"]
        kinds.append(", ".join((name, *(f"{key} {score.result.settings.get(key, '-')}" for key in keys))))
    return kinds
