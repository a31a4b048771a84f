"""A curve as a few lines of text.

It is drawn in Braille characters: each is a grid of 2 x 4 dots, so a plot of 60 x 8 characters has
120 x 32 dots and still shows the shape of a run.
"""

import math
from collections.abc import Sequence

import numpy as np

from qerl.errors import QeRLError
from qerl.report.runs import number

BAR, TICK = "\N{BOX DRAWINGS LIGHT VERTICAL}", "\N{BOX DRAWINGS LIGHT VERTICAL AND LEFT}"
BRAILLE = 0x2800
# Bit of each dot of a Braille character, by row and column (Unicode chart U+2800).
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def terminal_curve(
    values: list[float], width: int = 60, height: int = 8, steps: tuple[int, int] | None = None
) -> str:
    """Draw a curve in Braille characters, with its range on the left and its first and last step below.

    Args:
        values: One value for each step; values that are not finite are gaps.
        width: Characters of the plot, labels not counted.
        height: Lines of the plot, the line below it not counted.
        steps: First and last step; None counts the values from 1 on.

    Returns:
        ``height + 1`` lines without a newline at the end. More values than dots are averaged by column.

    Raises:
        QeRLError: No value is finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        raise QeRLError("There is no finite value to draw; the run has logged none.")
    low, high = min(finite), max(finite)
    if low == high:
        low, high = low - 0.5, high + 0.5
    cells = _cells(_columns(values, 2 * width), (low, high), width, height)
    middle = height // 2
    centre = high - (4 * middle + 1.5) / (4 * height - 1) * (high - low)
    labels = {middle: number(centre), height - 1: number(low), 0: number(high)}
    margin = max(len(label) for label in labels.values())
    axis = dict.fromkeys(labels, TICK)
    rows = ["".join(chr(BRAILLE + cell) for cell in row) for row in cells]
    lines = [f"{labels.get(i, ''):>{margin}} {axis.get(i, BAR)}{row}" for i, row in enumerate(rows)]
    first, last = map(str, steps or (1, len(values)))
    lines.append(" " * (margin + 2) + first + last.rjust(width - len(first)))
    return "\n".join(lines)


def _columns(values: Sequence[float], columns: int) -> list[float]:
    """Return the curve's value at each column of dots: the mean of its values, or a linear interpolation."""
    count = len(values)
    if count <= columns:
        return np.interp(np.linspace(0, count - 1, columns), range(count), values).tolist()
    parts = [part[np.isfinite(part)] for part in np.array_split(values, columns)]
    return [float(part.mean()) if len(part) else math.nan for part in parts]


def _cells(curve: Sequence[float], span: tuple[float, float], width: int, height: int) -> list[list[int]]:
    """Return the bits of each Braille character; a vertical stroke joins dots of neighbouring columns."""
    low, high = span
    cells = [[0] * width for _ in range(height)]
    former: int | None = None
    for column, value in enumerate(curve):
        if not math.isfinite(value):
            former = None
            continue
        dot = round((high - value) / (high - low) * (4 * height - 1))
        start = dot if former is None else former + (dot > former) - (dot < former)
        for line in range(min(start, dot), max(start, dot) + 1):
            cells[line // 4][column // 2] |= DOTS[line % 4][column % 2]
        former = dot
    return cells
