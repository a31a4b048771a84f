"""The report: one HTML file that shows several runs side by side.

The file holds everything it needs (style sheet, drawings, numbers), so it opens from disk, can be mailed, and
sends no request to any server. Its only script, if any, filters completions; curves need none. Given up:
zooming.

For each chosen step the page shows the completions of the best and the worst group, turn by turn. Model
output is displayed and never executed: the templates escape all values, control characters and marks of
direction are shown as signs (`qerl.visible`), and a content security policy tells the browser to run no
script but the filter and to load nothing. Without the script all groups are present and open by a click.
"""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from qerl import __version__
from qerl.atomic import writing
from qerl.errors import QeRLError
from qerl.report.completions import Table, longest_text, read_tables, shown_groups
from qerl.report.runs import METRICS, Metric, Run, Series, number, read_runs, shown_series
from qerl.report.scores import Score, read_scores
from qerl.report.svg import Curve, chart, swatch
from qerl.run_folder import CONFIG_FILE, METRICS_FILE
from qerl.settings.algorithms import implied
from qerl.visible import seen

UNCOMPARED = ("output_dir", "run_name", "logging_dir")
"""Settings of a run's place and name, which are not compared."""

COMPLETIONS = 6
"""Default number of steps of a run whose completions are shown."""

Curves = dict[Metric, list[Curve]]
"""Curves by metric, one for each run that has the metric."""


def write_report(
    runs: list[Path], out: Path, scores: Sequence[Path] = (), completions: int = COMPLETIONS
) -> None:
    """Write one HTML page with the curves, final numbers, differing settings and completions of runs.

    Args:
        runs: Run folders, each given once, in the order of the legend.
        out: File to write; its folder is made, an older report is replaced.
        scores: Folders of evaluations outside the run folders; those inside are found.
        completions: Steps of each run whose completions are shown, if the run keeps them; 0 for none.

    Raises:
        QeRLError: A folder is no run, no run has logged a training step yet, or the file cannot be written.
    """
    read = read_runs(runs)
    curves = _curves(read)
    if not curves:
        folders = ", ".join(str(run) for run in runs)
        raise QeRLError(f"No step is logged in the {METRICS_FILE} of {folders} yet; wait for the first step.")
    tables = [read_tables(run, completions) for run in read]
    page = render(read, curves, read_scores(read, scores), tables)
    with writing(f"The report cannot be written to {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")


def _curves(runs: Sequence[Run]) -> Curves:
    curves: Curves = {}
    for metric in METRICS:
        found = [(i, run.label, shown_series(run, metric)) for i, run in enumerate(runs)]
        present = [Curve(i, label, data) for i, label, data in found if data is not None]
        if present:
            curves[metric] = present
    return curves


def render(
    runs: Sequence[Run], curves: Curves, scores: Sequence[Score] = (), tables: Sequence[Sequence[Table]] = ()
) -> str:
    """The page as text."""
    steps = [step for found in curves.values() for curve in found for step in curve.data.steps]
    settings = {i: run.settings for i, run in enumerate(runs) if run.settings is not None}
    shown = shown_groups(tables)
    choices = {
        "run": ("all runs", {str(i): run.label for i, run in enumerate(runs)}),
        "step": ("all steps", {group.step: group.step for group in shown}),
        "rank": ("best and worst groups", {"best": "best groups", "worst": "worst groups"}),
    }
    if len({group.run for group in shown}) < 2:
        del choices["run"]
    return _page(
        "report.html",
        title=f"QeRL run {runs[0].label}" if len(runs) == 1 else f"QeRL: {len(runs)} runs side by side",
        intro="Light lines are the logged values, strong lines their mean over a window of about a tenth of "
        "the run. Point at a curve to read its value.",
        script=filter_script() if shown else "",
        runs=runs,
        curves=curves,
        steps=(min(steps), max(steps)),
        scores=scores,
        settings=settings,
        config_file=CONFIG_FILE,
        differing=differing(completed(list(settings.values()))),
        shown=shown,
        choices=choices,
        longest=longest_text(shown),
    )


def document(title: str, intro: str, body: str) -> str:
    """Return a self-contained page, from title and introduction as text and a body in HTML."""
    return _page("document.html", title=title, intro=intro, body=Markup(body), script="")


def _page(template: str, script: str, **values: Any) -> str:
    """Render a template as a page that may run this script and no other."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script:
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    loader, strict = jinja2.PackageLoader("qerl.report"), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "seen": seen}
    environment.globals |= {
        "cells": _cells,
        "chart": lambda *drawn: Markup(chart(*drawn)),
        "swatch": lambda run: Markup(swatch(run)),
    }
    values |= {"policy": policy, "style": Markup(style_sheet()), "script": Markup(script)}
    return environment.get_template(template).render(values, version=__version__)


def style_sheet() -> str:
    """The style sheet of pages and drawings."""
    return files("qerl.report").joinpath("page.css").read_text(encoding="utf-8")


def filter_script() -> str:
    """The script of pages with completions."""
    return files("qerl.report").joinpath("filter.js").read_text(encoding="utf-8")


def _cells(metric: Metric, data: Series) -> list[str]:
    """Return the last value, the best one and its step, and the mean of the last tenth, formatted."""
    best, step = "", ""
    if metric.better is not None:
        value = max(data.values) if metric.better == "high" else min(data.values)
        best, step = number(value * metric.scale), number(data.steps[data.values.index(value)])
    return [number(data.values[-1] * metric.scale), best, step, number(data.tail_mean * metric.scale)]


def completed(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of several runs, each with the values of the fields that only others' files name.

    `qerl.settings.recipe.resolved` leaves out defaults that nobody set. An option of a field that is a
    mapping, such as ``task_options.level``, has no default and is not added.

    Args:
        settings: The config.yaml of each run, with nested keys joined by dots.
    """
    nested = {key.partition(".")[0] for one in settings for key in one if "." in key}
    nothing = [{key for key in nested if key in one and not one[key]} for one in settings]
    full = [
        {key: value for key, value in one.items() if key not in empty}
        for one, empty in zip(settings, nothing, strict=True)
    ]
    full = [one | {key: value for key, value in implied(one).items() if key not in one} for one in full]
    names = {key for one in full for key in one} - nested - {*UNCOMPARED}
    if any(names - one.keys() for one in full):
        from qerl.settings.recipe import left_out  # which imports torch, and takes seconds

        full = [one | {key: x for key, x in left_out(one).items() if key in names} for one in full]
    return full


def differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the settings whose values are not the same in all runs, each with the value of every run.

    A missing key is said to have its default; `completed` says which value that is.
    """
    keys = list(dict.fromkeys(key for one in settings for key in one if key not in UNCOMPARED))
    rows = {}
    for key in keys:
        values = [_value(one[key]) if key in one else "default" for one in settings]
        if len(set(values)) > 1:
            rows[key] = values
    return rows


def _value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
