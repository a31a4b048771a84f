"""The report: one HTML file that shows several runs side by side.

The file holds everything it needs (style sheet, drawings, numbers), so it opens from disk, survives being
mailed, and asks no server for anything. The one script that it may hold filters completions; curves need
none, and what was given up is zooming. Since the page shows what models wrote, it also says itself, in a
content security policy, that a browser may run no other script and ask for nothing.
"""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from qerl import __version__
from qerl.errors import QeRLError
from qerl.report.completions import Table, read_tables
from qerl.report.metrics import METRICS, Metric, number
from qerl.report.runs import Run, Series, read_runs, series
from qerl.report.scores import Score, read_scores
from qerl.report.svg import chart, swatch
from qerl.report.transcripts import filter_script, transcripts
from qerl.run_folder import CONFIG_FILE, METRICS_FILE

UNCOMPARED = ("output_dir", "run_name", "logging_dir")
"""Settings that say where a run is kept and not what it does."""

COMPLETIONS = 6
"""Steps of a run of which completions are shown, where nobody says how many."""

Curves = dict[Metric, list[tuple[int, str, Series]]]
"""For each metric that occurs: index, label and values of the runs that have it."""


def write_report(
    runs: list[Path], out: Path, scores: Sequence[Path] = (), completions: int = COMPLETIONS
) -> None:
    """Write one HTML page with the curves, final numbers, differing settings and completions of runs.

    Args:
        runs: Run folders, each given once; their order is that of the legend.
        out: File to write; its folder is made, an older report is replaced.
        scores: Folders of evaluations outside the run folders; those inside are found.
        completions: Steps of each run of which completions are shown, if the run keeps them; 0 for none.

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
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise QeRLError(
            f"The report cannot be written to {out}: {error.strerror}; choose another --out."
        ) from error


def _curves(runs: Sequence[Run]) -> Curves:
    curves: Curves = {}
    for metric in METRICS:
        found = [(i, run.label, series(run.rows, metric.key)) for i, run in enumerate(runs)]
        present = [(i, label, data) for i, label, data in found if data is not None]
        if present:
            curves[metric] = present
    return curves


def render(
    runs: Sequence[Run],
    curves: Curves,
    scores: Sequence[Score] = (),
    tables: Sequence[Sequence[Table]] = (),
) -> str:
    """The page as text."""
    title = f"QeRL run {runs[0].label}" if len(runs) == 1 else f"QeRL: {len(runs)} runs side by side"
    steps = [step for found in curves.values() for _, _, data in found for step in data.steps]
    figures = "\n".join(_figure(*item, (min(steps), max(steps))) for item in curves.items())
    intro = (
        "Light lines are the logged values, strong lines their mean over a window of about a tenth of the "
        "run. Point at a curve to read its value."
    )
    samples = transcripts(runs, tables)
    body = f"""<div class="charts">
{figures}
</div>
{_scores(runs, scores)}
<h2>Numbers</h2>
{_numbers(curves)}
{_settings(runs)}
{samples}"""
    return document(title, intro, body, _legend(runs), filter_script() if samples else "")


def style_sheet() -> str:
    """The style of pages and drawings."""
    return files("qerl.report").joinpath("page.css").read_text(encoding="utf-8")


def document(title: str, intro: str, body: str, legend: str = "", script: str = "") -> str:
    """A whole page that needs nothing but itself.

    Args:
        title: Of the page, as text.
        intro: What the reader is to know first, as text.
        body: The content, as HTML.
        legend: What stays in sight while the page is scrolled, as HTML.
        script: The only script that the page may run; empty for none.
    """
    element = f"<script>{script}</script>\n" if script else ""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script:
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style_sheet()}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(intro)}</p>
</header>
{legend}
<main>
{body}
</main>
<footer>qerl {escape(__version__)}</footer>
{element}</body>
</html>
"""


def _legend(runs: Sequence[Run]) -> str:
    items = []
    for i, run in enumerate(runs):
        last = max((row["step"] for row in run.rows), default=0)
        items.append(
            f'<li title="{escape(str(run.folder))}">{swatch(i)}{escape(run.label)} '
            f'<span class="dim">{number(last)} steps</span></li>'
        )
    return f'<div class="legend"><ul>{"".join(items)}</ul></div>'


def _figure(metric: Metric, curves: list[tuple[int, str, Series]], steps: tuple[int, int]) -> str:
    left_out = sum(data.left_out for _, _, data in curves)
    note = f' <span class="dim">values left out, not finite: {left_out}</span>' if left_out else ""
    drawing = chart(metric, curves, steps)
    return f"<figure><figcaption>{escape(metric.title)}{note}</figcaption>{drawing}</figure>"


def _scores(runs: Sequence[Run], scores: Sequence[Score]) -> str:
    """Held-out scores with their intervals; nothing where no evaluation is known."""
    if not scores:
        return ""
    head = (
        "<thead><tr><th>policy</th><th>task</th><th class='num'>score, %</th>"
        "<th class='num'>95 % interval</th><th class='num'>problems</th><th>weights</th></tr></thead>"
    )
    rows = "".join(_score_row(runs, score) for score in scores)
    table = f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'
    return f"<h2>Held-out scores</h2>\n{table}"


def _score_row(runs: Sequence[Run], score: Score) -> str:
    what = escape(score.what)
    if score.run is not None:
        step = Path(score.what).name if Path(score.what).name.startswith("checkpoint-") else ""
        what = f"{swatch(score.run)}{escape(runs[score.run].label)} <span class='dim'>{escape(step)}</span>"
    low, high = (100 * bound for bound in score.interval)
    return (
        f'<tr title="{escape(str(score.folder))}"><th scope="row">{what}</th>'
        f"<td>{escape(score.task)} <span class='dim'>{score.measure}</span></td>"
        f'<td class="num">{100 * score.accuracy:.1f}</td><td class="num">{low:.1f} to {high:.1f}</td>'
        f'<td class="num">{score.problems}</td><td>{escape(score.weights)}</td></tr>'
    )


def _numbers(curves: Curves) -> str:
    """Last, best and final mean of each metric, the runs below each other."""
    head = (
        "<thead><tr><th>metric</th><th>run</th><th class='num'>last</th><th class='num'>best</th>"
        "<th class='num'>at step</th><th class='num'>mean of last 10 %</th></tr></thead>"
    )
    bodies = []
    for metric, found in curves.items():
        name = escape(metric.title) + (
            f' <span class="dim">{escape(metric.unit)}</span>' if metric.unit else ""
        )
        rows = [_number_row(metric, *curve) for curve in found]
        first = f'<tr><th scope="rowgroup" rowspan="{len(found)}">{name}</th>{rows[0]}</tr>'
        bodies.append(f"<tbody>{first}{''.join(f'<tr>{row}</tr>' for row in rows[1:])}</tbody>")
    return f'<div class="scroll"><table>{head}{"".join(bodies)}</table></div>'


def _number_row(metric: Metric, index: int, label: str, data: Series) -> str:
    best, step = "", ""
    if metric.better is not None:
        value = max(data.values) if metric.better == "high" else min(data.values)
        best, step = number(value * metric.scale), number(data.steps[data.values.index(value)])
    last, tail = number(data.values[-1] * metric.scale), number(data.tail_mean * metric.scale)
    cells = "".join(f'<td class="num">{text}</td>' for text in (last, best, step, tail))
    return f"<td>{swatch(index)}{escape(label)}</td>{cells}"


def _settings(runs: Sequence[Run]) -> str:
    """What the runs were told differently; nothing for a single run."""
    if len(runs) < 2:
        return ""
    known = [(i, run) for i, run in enumerate(runs) if run.settings is not None]
    missing = [run.label for run in runs if run.settings is None]
    parts = ["<h2>Settings that differ</h2>"]
    if missing:
        parts.append(f"<p>Without {CONFIG_FILE}: {escape(', '.join(missing))}.</p>")
    rows = differing([run.settings for _, run in known if run.settings is not None])
    if not rows:
        parts.append("<p>None.</p>")
        return "\n".join(parts)
    head = "".join(f"<th>{swatch(i)}{escape(run.label)}</th>" for i, run in known)
    body = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for key, values in rows.items()
    )
    parts.append(
        f'<div class="scroll"><table class="settings"><thead><tr><th>setting</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    return "\n".join(parts)


def differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Settings whose values are not the same in all runs, each with the value of every run.

    A key that a config.yaml lacks stands at its default, as `qerl.settings.recipe.resolved` writes them.
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
