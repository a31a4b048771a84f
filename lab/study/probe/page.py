"""The page of a probe, and its figures, from results alone."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from lab.study.figures import standalone
from lab.study.probe.plan import all_cells
from lab.study.probe.spec import make_probe
from lab.study.probe.summary import GROUP, HARD, Estimate, Results, Row, by, read_rows
from qerl.atomic import writing
from qerl.report.page import document
from qerl.report.svg import tick, ticks

WIDTH, LEFT, RIGHT, LINE, TOP, BOTTOM = 560, 190, 16, 20, 8, 42

PERTURBED = {
    "kl": "KL a token",
    "pass@1": "pass@1",
    "success": "pass@1, more",
    "gain": f"log pass@{GROUP}, more",
    "per_nat": "the same per nat",
    "hard": "pass@1 of hard problems, more",
    "solved": "problems solved once",
    "answers": "distinct answers",
    "entropy_more": "entropy a token, more",
    "ess": "effective samples",
    "ess_token": "effective tokens",
    "shift": "log-odds shift",
    "spread": "its deviation",
    "lift": "log of mean q / p",
}
FORMATS = {
    "error": "error of weights",
    "prefix_entropy": "entropy on prefixes",
    "prefix_more": "more than the first",
    "prefix_kl": "KL from the first",
    "entropy": "entropy of own samples",
    "entropy_more": "more than the first",
    "pass@1": "pass@1",
    "success": "more than the first",
    "gain": f"log pass@{GROUP}, more",
    "solved": "problems solved once",
    "answers": "distinct answers",
}


def write_page(results: Results, out: Path) -> None:
    """Write one HTML file that needs nothing but itself.

    Raises:
        QeRLError: The file cannot be written.
    """
    rows = read_rows(results)
    parts = []
    for policy, task in dict.fromkeys((row.policy, row.task) for row in rows):
        here = by(rows, policy, task)
        what = "formats, untrained" if policy is None else f"policy {policy}"
        parts.append(f"<h2>{escape(task)}: {escape(what)}</h2>")
        for _, title, drawing in _figures(here):
            parts.append(f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>")
        parts.append(_table(here, FORMATS if policy is None else PERTURBED))
    probe = results["probe"]
    intro = (
        f"{results['date']}: {probe['model']}, {probe['samples']} samples of each of {probe['problems']} "
        f"problems a cell, on {results['device']}. Intervals are 95 %, by a bootstrap over "
        f"problems, paired with clean samples. Hard are problems that at most {HARD:.0%} of "
        "other clean samples solve."
    )
    if missing := len(all_cells(make_probe(probe))) - len(results["cells"]):
        intro = f"Unfinished: {missing} cells are missing. {intro}"
    _write(out, document("What a perturbation of the sampler buys", intro, "\n".join(parts)))


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Write the figures of the page as SVG files, `probe-TASK-POLICY-WHAT.svg`, and return them.

    Raises:
        QeRLError: A file cannot be written.
    """
    rows, written = read_rows(results), []
    for policy, task in dict.fromkeys((row.policy, row.task) for row in rows):
        for name, _, drawing in _figures(by(rows, policy, task)):
            written.append(folder / f"probe-{task}-{policy or 'formats'}-{name}.svg")
            _write(written[-1], standalone(drawing))
    return written


def _write(out: Path, text: str) -> None:
    with writing(f"{out} cannot be written", "choose another folder"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def _figures(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Name, title and drawing of the figures of one policy and task."""
    wanted = (
        ("gain", f"log P(one of {GROUP} is right), more than clean"),
        ("per_nat", "the same for each nat a token"),
    )
    if rows[0].policy is None:
        wanted = (
            ("prefix_more", "entropy along the same prefixes, nats a token more than the first format"),
            ("gain", f"log P(one of {GROUP} is right), more than the first format"),
        )
    found = []
    for key, title in wanted:
        items = [(_label(row), row.numbers[key]) for row in rows if key in row.numbers]
        items = [(label, estimate) for label, estimate in items if math.isfinite(estimate.value)]
        if items:
            found.append((key, title, forest(items, title)))
    return found


def _label(row: Row) -> str:
    if row.target is not None:
        return f"{row.what}, {row.target:g} nats"
    if row.policy is not None:
        return row.what
    draw = row.cell.split("-")[-2]
    return f"{row.what}{' ' + draw if draw != '0' else ''}, T {row.strength:.3g}"


def forest(items: Sequence[tuple[str, Estimate]], title: str) -> str:
    """Estimates with their intervals below each other, as an SVG element.

    Args:
        items: Label and estimate of each line.
        title: What is drawn, for those who do not see it.
    """
    marks = ticks(min(0.0, *(e.low for _, e in items)), max(0.0, *(e.high for _, e in items)), 5)
    height = TOP + LINE * len(items) + BOTTOM

    def x(value: float) -> float:
        return LEFT + (value - marks[0]) / (marks[-1] - marks[0]) * (WIDTH - LEFT - RIGHT)

    bottom = height - BOTTOM
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for mark in marks:
        out.append(f'<line class="grid" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(
            f'<text class="tick" x="{x(mark):.1f}" y="{bottom + 18}" text-anchor="middle">{tick(mark)}</text>'
        )
    out.append(f'<line class="axis" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP}" y2="{bottom}"/>')
    for index, (label, estimate) in enumerate(items):
        y = TOP + LINE * (index + 0.5)
        low, value, high = map(x, (estimate.low, estimate.value, estimate.high))
        out.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y:.1f}" dy=".33em" text-anchor="end">'
            f'{escape(label)}</text><g class="s0"><title>{escape(f"{label}: {_text(estimate)}")}</title>'
            f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="mark" cx="{value:.1f}" cy="{y:.1f}" r="4.5"/></g>'
        )
    return "".join([*out, "</svg>"])


def _table(rows: Sequence[Row], columns: dict[str, str]) -> str:
    for row in rows:  # of the parts of a task
        columns = columns | {key: f"{key}, more" for key in row.numbers if key.startswith("success/")}
    shown = [key for key in columns if any(key in row.numbers for row in rows)]
    head = "".join(f"<th class='num'>{escape(columns[key])}</th>" for key in shown)
    body = "".join(
        f'<tr><th scope="row">{escape(_label(row))}</th><td class="num">{row.strength:.4g}</td>'
        f"{''.join(_cells(row, shown))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr><th></th><th class="num">strength</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(row: Row, columns: Iterable[str]) -> list[str]:
    return [
        f'<td class="num">{escape(_text(row.numbers[key])) if key in row.numbers else ""}</td>'
        for key in columns
    ]


def _text(estimate: Estimate) -> str:
    if not math.isfinite(estimate.value):
        return "none"
    if estimate.low == estimate.high:
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} ({estimate.low:.2g} to {estimate.high:.2g})"
