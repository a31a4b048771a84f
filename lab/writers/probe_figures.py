"""Figures of probes for the docs: forest plots of the estimates of each policy's cells, with intervals."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lab.study.figures import standalone
from lab.writers.probe_rows import GROUP, Estimate, Row, read
from qerl.report.svg import tick, ticks

WIDTH, LEFT, RIGHT, LINE, TOP, BOTTOM = 560, 190, 16, 20, 8, 42

OF_POLICIES = {
    "gain": f"log P(one of {GROUP} is right), more than clean",
    "per_nat": "the same for each nat a token",
}
OF_FORMATS = {
    "prefix_more": "entropy along the same prefixes, nats a token more than the first format",
    "gain": f"log P(one of {GROUP} is right), more than the first format",
}
"""Titles of the figures by the name of the estimate."""


def write_figures(name: str, folder: Path) -> list[Path]:
    """Write the figures of a probe as SVG files, `probe-TASK-POLICY-WHAT.svg`, and return them.

    Args:
        name: Name of the probe's file in bench/results.
        folder: Folder to write into.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, written = read(name), []
    for policy, task in dict.fromkeys((row.policy, row.task) for row in rows):
        here = [row for row in rows if (row.policy, row.task) == (policy, task)]
        for key, title in (OF_FORMATS if policy is None else OF_POLICIES).items():
            items = [(_label(row), row.numbers[key]) for row in here if key in row.numbers]
            if items:
                written.append(folder / f"probe-{task}-{policy or 'formats'}-{key}.svg")
                written[-1].write_text(standalone(forest(items, title)), encoding="utf-8")
    return written


def _label(row: Row) -> str:
    if row.target is not None:
        return f"{row.what}, {row.target:g} nats"
    draw = row.cell.split("-")[-2]
    return f"{row.what}{' ' + draw if draw != '0' else ''}, T {row.strength:.3g}"


def forest(items: Sequence[tuple[str, Estimate]], title: str) -> str:
    """Return a forest plot, one estimate with its interval per line, as an SVG element.

    Args:
        items: Label and estimate of each line.
        title: Description of the figure for screen readers.
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


def _text(estimate: Estimate) -> str:
    if estimate.low == estimate.high:
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} ({estimate.low:.2g} to {estimate.high:.2g})"
