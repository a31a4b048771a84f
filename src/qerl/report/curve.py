"""The reward curve as a PNG, and any curve as a few lines of text.

The text is drawn in Braille characters: each is a grid of 2 x 4 dots, so a plot of 60 x 8 characters has
120 x 32 dots and still shows the shape of a run.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from qerl.errors import QeRLError
from qerl.report.metrics import number
from qerl.report.runs import METRICS_FILE, read_metrics, series

BAR, TICK = "\N{BOX DRAWINGS LIGHT VERTICAL}", "\N{BOX DRAWINGS LIGHT VERTICAL AND LEFT}"
BRAILLE = 0x2800
# Bit of each dot of a Braille character, by row and column (Unicode chart U+2800).
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

# (metric, label, colour); the colours stay apart for the colour-blind too.
_LEFT = (("reward", "reward", "#0b62c4"), ("rewards/accuracy/mean", "accuracy", "#118052"))


def reward_curve_png(run: Path, out: Path) -> None:
    """Draw reward and accuracy by step, and the noise that was in force on a second axis.

    Args:
        run: Run folder.
        out: PNG file to write, 1600 x 900 pixels.

    Raises:
        QeRLError: The run has no metrics or no reward yet, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of imports that only this needs
    from matplotlib.figure import Figure

    rows = read_metrics(run)
    if series(rows, "reward") is None:
        raise QeRLError(f"No reward is logged in {run / METRICS_FILE} yet; wait for the first step.")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window system, whatever matplotlib is set to
    axes = figure.add_subplot()
    lines = []
    for key, label, colour in _LEFT:
        data = series(rows, key)
        if data is not None:
            axes.plot(data.steps, data.values, color=colour, alpha=0.3, linewidth=1)
            lines += axes.plot(data.steps, data.smoothed, color=colour, linewidth=2.2, label=label)
    axes.set(xlabel="step", ylabel="reward, share of right answers", title=run.resolve().name)
    if axes.dataLim.ymin >= 0:  # then both axes start at zero
        axes.set_ylim(bottom=0)
    axes.grid(color="#e6e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    sigma = series(rows, "noise/sigma")
    if sigma is not None:
        noise = axes.twinx()
        lines += noise.step(
            sigma.steps,
            sigma.values,
            where="post",
            color="#8a5a00",
            linestyle="--",
            label="noise sigma (right)",
        )
        noise.set_ylabel("noise sigma")
        noise.set_ylim(bottom=0)
        noise.spines["top"].set_visible(False)
    axes.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
    try:
        figure.savefig(out, dpi=200, format="png")
    except OSError as error:
        raise QeRLError(f"The curve cannot be written to {out}: {error.strerror}.") from error


def terminal_curve(values: list[float], width: int = 60, height: int = 8) -> str:
    """A curve in Braille characters with its range on the left and its first and last number below.

    Args:
        values: One value for each step from 1 on; values that are not finite are gaps.
        width: Characters of the plot, labels not counted.
        height: Lines of the plot, the line below it not counted.

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
    lines = [
        f"{labels.get(line, ''):>{margin}} {axis.get(line, BAR)}"
        + "".join(chr(BRAILLE + cell) for cell in row)
        for line, row in enumerate(cells)
    ]
    first, last = "1", f"{len(values)}"
    lines.append(" " * (margin + 2) + first + last.rjust(width - len(first)))
    return "\n".join(lines)


def _columns(values: Sequence[float], columns: int) -> list[float]:
    """The curve's value at each column of dots: means of what falls into it, or straight lines between."""
    count = len(values)
    out = []
    for column in range(columns):
        if count > columns:
            part = values[column * count // columns : (column + 1) * count // columns]
            part = [value for value in part if math.isfinite(value)]
            out.append(sum(part) / len(part) if part else math.nan)
        else:
            place = column / max(columns - 1, 1) * (count - 1)
            before = int(place)
            after = min(before + 1, count - 1)
            out.append(values[before] + (place - before) * (values[after] - values[before]))
    return out


def _cells(curve: Sequence[float], span: tuple[float, float], width: int, height: int) -> list[list[int]]:
    """Bits of each Braille character; dots of neighbouring columns are joined by a vertical stroke."""
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
