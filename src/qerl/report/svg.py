"""One chart as inline SVG: raw points light, smoothed curve strong, a tooltip at the points.

Colours are classes (``s0`` to ``s7``, resolved by the page's CSS variables), so that one drawing serves the
light and the dark scheme. Tooltips are SVG ``<title>`` elements, which browsers show without a script; to
keep a page of long runs small, at most `TOOLTIPS` points of a curve carry one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from qerl.report.runs import Metric, Series, number

COLOURS = 8
TOOLTIPS = 120
WIDTH, HEIGHT = 520, 280
LEFT, RIGHT, TOP, BOTTOM = 74, 14, 12, 44
DASHES = 3
"""Kinds of dashes in the style sheet: runs beyond the eighth repeat the colours, dashed."""


class Curve(NamedTuple):
    """A metric of one run: the run's index, which decides the colour, its label and the values."""

    run: int
    label: str
    data: Series


@dataclass(frozen=True)
class Frame:
    """The scale of a drawing: the first and last step, and the values at its lower and upper edge."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, step: float) -> float:
        low, high = self.x_range
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def style_class(index: int) -> str:
    """CSS classes of a run: colour and, beyond `COLOURS` runs, dashes."""
    return f"s{index % COLOURS} d{index // COLOURS % DASHES}"


def swatch(index: int) -> str:
    """A short line in the colour and the dashes of a run."""
    return (
        f'<svg class="swatch {style_class(index)}" viewBox="0 0 26 10" aria-hidden="true">'
        '<path class="smooth" d="M2 5L24 5"/></svg>'
    )


def chart(metric: Metric, curves: Sequence[Curve], steps: tuple[int, int]) -> str:
    """Return an SVG element with a curve for each run.

    Args:
        metric: The metric to draw.
        curves: One curve for each run that has the metric.
        steps: First and last step of the axis, the same for all charts of a page.
    """
    first, last = steps
    values = [value * metric.scale for curve in curves for value in curve.data.values]
    y_ticks = ticks(min(0.0, *values), max(0.0, *values), 5)
    frame = Frame((first, max(last, first + 1)), (y_ticks[0], y_ticks[-1]))
    body = [axes(frame, y_ticks, step_ticks(frame), metric.unit, "step")]
    body += [_curve(metric, frame, curve) for curve in curves]
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f'<svg {box} aria-label="{escape(metric.title)} by step">{"".join(body)}</svg>'


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers at equal distances, the first at or below ``low``, the last at or above ``high``.

    Args:
        low, high: The range; a width of (nearly) zero is replaced by 1.
        about: Wanted number of intervals.
    """
    if high - low < 1e-100:
        high = low + 1.0
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def step_ticks(frame: Frame) -> list[tuple[float, str]]:
    """Return positions and labels of the ticks on the axis of steps."""
    low, high = frame.x_range
    return [(at, tick(at)) for at in ticks(low, high, 6) if low <= at <= high and at == int(at)]


def axes(
    frame: Frame, y_ticks: Sequence[float], x_ticks: Sequence[tuple[float, str]], unit: str, x_name: str
) -> str:
    """Return the grid, ticks and names of both axes as SVG.

    Args:
        frame: The scale.
        y_ticks: Values with a line and a number.
        x_ticks: Positions of ticks along the lower edge, and their labels.
        unit: Of the values, empty for pure numbers.
        x_name: Name of the horizontal axis.
    """
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    out = []
    for value in y_ticks:
        y = frame.y(value)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y:.1f}" dy=".33em" text-anchor="end">{tick(value)}</text>'
        )
    for value, words in x_ticks:
        x = frame.x(value)
        out.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        out.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(words)}</text>'
        )
    zero = frame.y(min(max(0.0, y_ticks[0]), y_ticks[-1]))
    out.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{zero:.1f}" y2="{zero:.1f}"/>')
    out.append(f'<text class="name" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escape(x_name)}</text>')
    if unit:
        middle = (TOP + bottom) / 2
        out.append(
            f'<text class="name" transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(unit)}</text>"
        )
    return "".join(out)


def tick(value: float) -> str:
    """Format a number beside an axis."""
    return number(round(value, 12) + 0.0)  # neither -0 nor the tail of 3 * 0.1


def _curve(metric: Metric, frame: Frame, curve: Curve) -> str:
    index, label, data = curve
    raw = [value * metric.scale for value in data.values]
    strong = [value * metric.scale for value in data.smoothed] if metric.smooth else raw
    marks = f'data-metric="{escape(metric.key)}" data-run="{escape(label)}"'
    out = [f'<g class="{style_class(index)}">']
    if metric.smooth:
        out.append(f'<path class="raw" d="{_path(frame, data.steps, raw)}"/>')
    corners = not metric.smooth
    out.append(f'<path class="smooth" {marks} d="{_path(frame, data.steps, strong, corners)}"/>')
    stride = -(-len(raw) // TOOLTIPS)
    for i in sorted({*range(0, len(raw), stride), len(raw) - 1}):
        text = f"{label}, step {data.steps[i]}: {number(raw[i])} {metric.unit}".rstrip()
        if metric.smooth and strong[i] != raw[i]:
            text += f" (smoothed {number(strong[i])})"
        x, y = frame.x(data.steps[i]), frame.y(strong[i])
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(text)}</title></circle>')
    return "".join([*out, "</g>"])


def _path(frame: Frame, steps: Sequence[int], values: Sequence[float], corners: bool = False) -> str:
    """Return a path through the points: straight lines, or with ``corners`` level ones and vertical steps."""
    pairs = zip(steps, values, strict=True)
    points = [(f"{frame.x(step):.1f}", f"{frame.y(value):.1f}") for step, value in pairs]
    if len(points) == 1:  # a line of no length shows as a dot, thanks to round caps
        points *= 2
    (x, y), *rest = points
    moves = [f"H{x}V{y}" if corners else f"L{x} {y}" for x, y in rest]
    return f"M{x} {y}" + "".join(moves)
