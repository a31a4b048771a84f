"""The drawings of a study as SVG: curves with bands, paired differences, accuracy by learning rate.

Each drawing is an element whose colours are classes of the report's style sheet, so that it suits the light
and the dark page; `standalone` turns it into a file with its own style sheet. Bands are the bootstrap
interval (95 %) of the mean over seeds. Claims rest on the difference seed by seed, not on whether two bands
overlap: arms share their seeds, and the differences vary less than the arms do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from lab.study.statistics import Comparison, mean_interval
from qerl.report.page import style_sheet
from qerl.report.runs import Metric, number
from qerl.report.svg import HEIGHT, LEFT, RIGHT, WIDTH, Frame, axes, step_ticks, style_class, tick, ticks

_ROW = 22
"""Height of a line of a legend or of a comparison."""


@dataclass(frozen=True)
class Band:
    """Values of one arm with their interval.

    Attributes:
        index: Index of the curve in its drawing, which decides its colour.
        label: Name of the curve.
        at: Horizontal positions [points].
        mean, low, high: Mean over seeds and the bounds of its interval, each [points].
        seeds: Number of seeds.
    """

    index: int
    label: str
    at: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    seeds: int


def band(index: int, label: str, at: Sequence[float], values: np.ndarray) -> Band:
    """Compute the band of values [seeds, points]."""
    low, high = mean_interval(values)
    return Band(index, label, list(at), [*values.mean(axis=0)], [*low], [*high], len(values))


def band_chart(
    metric: Metric, bands: Sequence[Band], x_labels: Sequence[str] = (), x_name: str = "step"
) -> str:
    """Curves with bands, and a legend below them.

    Args:
        metric: The metric that is drawn.
        bands: The curves.
        x_labels: Labels of the positions 0, 1, ... if these are not steps.
        x_name: Name of the horizontal axis.
    """
    scale = metric.scale
    ends = [value * scale for one in bands for value in (*one.low, *one.high)]
    y_ticks = ticks(min(0.0, *ends), max(0.0, *ends), 5)
    if x_labels:
        frame = Frame((-0.3, len(x_labels) - 0.7), (y_ticks[0], y_ticks[-1]))
        marks = [(float(i), label) for i, label in enumerate(x_labels)]
    else:
        last = max(at for one in bands for at in one.at)
        frame = Frame((min(0.0, *(one.at[0] for one in bands)), max(last, 1)), (y_ticks[0], y_ticks[-1]))
        marks = step_ticks(frame)
    height = HEIGHT + _ROW * -(-len(bands) // 2) + 6
    body = [axes(frame, y_ticks, marks, metric.unit, x_name)]
    body += [_band(metric, frame, one, bool(x_labels)) for one in bands]
    body += [_legend(i, one) for i, one in enumerate(bands)]
    return _svg(WIDTH, height, f"{metric.title} by {x_name}", "".join(body))


def _band(metric: Metric, frame: Frame, one: Band, points: bool) -> str:
    xs = [frame.x(at) for at in one.at]
    mean, low, high = (
        [frame.y(value * metric.scale) for value in values] for values in (one.mean, one.low, one.high)
    )
    out = [f'<g class="{style_class(one.index)}" data-arm="{escape(one.label)}">']
    if points:
        out += [_whisker(x, x, bottom, top) for x, bottom, top in zip(xs, low, high, strict=True)]
    else:
        around = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        out.append(f'<path class="band" d="{_line(around)}Z"/>')
    out.append(f'<path class="smooth" d="{_line(list(zip(xs, mean, strict=True)))}"/>')
    for i, (x, y) in enumerate(zip(xs, mean, strict=True)):
        value, bounds = one.mean[i], (one.low[i], one.high[i])
        words = f"{one.label}, {number(one.at[i])}: " if not points else f"{one.label}: "
        words += f"{number(value * metric.scale)} ({' to '.join(number(b * metric.scale) for b in bounds)})"
        title = f"<title>{escape(words)} {metric.unit}</title>"
        mark = ' class="mark"' if points else ""
        out.append(f'<circle{mark} cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>')
    return "".join([*out, "</g>"])


def _line(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points if len(points) > 1 else [*points, *points]  # a line of length 0 shows as a dot
    return f"M{x:.1f} {y:.1f}" + "".join(f"L{x:.1f} {y:.1f}" for x, y in rest)


def _whisker(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="whisker" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _legend(i: int, one: Band) -> str:
    x, y = LEFT + i % 2 * (WIDTH - LEFT) / 2, HEIGHT + _ROW * (i // 2) + 12
    words = f"{escape(one.label)} ({one.seeds} seeds)"
    return (
        f'<g class="{style_class(one.index)}"><path class="smooth" d="M{x} {y}H{x + 22}"/>'
        f'<text class="word" x="{x + 30}" y="{y}" dy=".33em">{words}</text></g>'
    )


def difference_chart(comparisons: Sequence[Comparison]) -> str:
    """Paired differences with their intervals, one line per comparison, by family."""
    width, left = 760, 300
    margin = comparisons[0].equivalence
    ends = [bound for one in comparisons for bound in one.interval]
    x_ticks = ticks(min(-1.5 * margin, *ends), max(1.5 * margin, *ends), 6)
    low, high = x_ticks[0], x_ticks[-1]

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - RIGHT)

    lines, y, family = [], 14.0, ""
    for one in comparisons:
        if one.family != family:
            family, y = one.family, y + 0.4 * _ROW
            lines.append(f'<text class="name" x="8" y="{y:.0f}" dy=".33em">{escape(family)}</text>')
            y += _ROW
        lines.append(_difference(one, x, y))
        y += _ROW
    bottom = y
    grid = [
        f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="8" y2="{bottom:.0f}"/>'
        f'<text class="tick" x="{x(at):.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{tick(at)}</text>'
        for at in x_ticks
    ]
    grid += [
        f'<line class="{kind}" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="8" y2="{bottom:.0f}"/>'
        for kind, at in (("limit", -margin), ("axis", 0.0), ("limit", margin))
    ]
    name = "difference in area under the curve of accuracy, first minus second, 95 %"
    grid.append(
        f'<text class="name" x="{width - RIGHT}" y="{bottom + 36:.0f}" text-anchor="end">{name}</text>'
    )
    return _svg(width, round(bottom) + 46, "Paired differences", "".join([*grid, *lines]))


def _difference(one: Comparison, x: Callable[[float], float], y: float) -> str:
    low, high = one.interval
    pair = f"{escape(one.first)} \N{MINUS SIGN} {escape(one.second)}"
    words = f"{number(one.mean)} ({number(low)} to {number(high)}), {one.seeds} seeds"
    return (
        f'<g class="s0" data-pair="{escape(one.first)} {escape(one.second)}"><title>{escape(words)}</title>'
        f'<text class="word" x="20" y="{y:.0f}" dy=".33em">{pair}</text>'
        f"{_whisker(x(low), x(high), y, y)}"
        f'<circle class="mark" cx="{x(one.mean):.1f}" cy="{y:.0f}" r="4.5"/></g>'
    )


def _svg(width: int, height: int, label: str, body: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'


def standalone(svg: str) -> str:
    """Turn a drawing into the text of an SVG file, with its style sheet and a background."""
    head, rest = svg.split(">", 1)
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ')
    ground = '<rect width="100%" height="100%" fill="var(--card)"/>'
    return f"{head}><style>{style_sheet()}</style>{ground}{rest}\n"
